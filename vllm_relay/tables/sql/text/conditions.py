# SPDX-License-Identifier: Apache-2.0
"""AND, OR and NOT of a condition, so that what asks is evaluated last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from sqlglot.tokens import TokenType

from vllm_relay.tables.sql.text.structure import Range, Structure

Kind = Literal["and", "or", "not", "leaf"]


@dataclass(eq=False)
class Condition:
    """
    Attributes:
        kind: of the operator.
        range: of its tokens.
        parts: operands.
        asks: whether there is a call in it.
        has_query: whether there is a subquery in it.
    """

    kind: Kind
    range: Range
    asks: bool
    has_query: bool
    parts: list[Condition] = field(default_factory=list)


def read_condition(structure: Structure, tokens: Range, asks: Callable[[Range], bool]) -> Condition:
    """The operators of a condition, as far as calls are below them."""
    inner = tokens
    while (
        structure.is_type(inner[0], TokenType.L_PAREN)
        and structure.match.get(inner[0]) == inner[1] - 1
        and not structure.starts_query(inner[0])
    ):
        inner = (inner[0] + 1, inner[1] - 1)
    has_call = asks(inner)
    has_query = any(structure.starts_query(number) for number in range(*inner))
    if has_call:
        operators: list[tuple[Kind, TokenType]] = [("or", TokenType.OR), ("and", TokenType.AND)]
        for kind, separator in operators:
            ranges = _operands(structure, inner, separator)
            if len(ranges) > 1:
                parts = [read_condition(structure, part, asks) for part in ranges]
                return Condition(kind, inner, has_call, has_query, parts)
        if structure.is_type(inner[0], TokenType.NOT):
            part = read_condition(structure, (inner[0] + 1, inner[1]), asks)
            return Condition("not", inner, has_call, has_query, [part])
    return Condition("leaf", inner, has_call, has_query)


def _operands(structure: Structure, tokens: Range, separator: TokenType) -> list[Range]:
    parts: list[Range] = []
    begin, depth, num_betweens = tokens[0], 0, 0
    for number in structure.flat(tokens):
        word = structure.tokens[number].token_type
        if word == TokenType.CASE:
            depth += 1
        elif word == TokenType.END:
            depth -= 1
        elif depth == 0 and word == TokenType.BETWEEN:
            num_betweens += 1
        elif depth == 0 and word == TokenType.AND and num_betweens:
            num_betweens -= 1
        elif depth == 0 and word == separator:
            parts.append((begin, number))
            begin = number + 1
    return [*parts, (begin, tokens[1])]


def conjuncts(condition: Condition) -> list[Condition]:
    if condition.kind != "and":
        return [condition]
    return [inner for part in condition.parts for inner in conjuncts(part)]


Text = Callable[[Range], str]


def lazy_filter(condition: Condition, text: Text, is_whole: bool = True) -> str:
    """A text of which only the truth matters: NULL may be false, as in WHERE.

    Args:
        is_whole: DuckDB sees its conjuncts, and may move them.
    """
    if condition.kind == "and":
        return chain(conjuncts(condition), text, is_whole)
    if condition.kind == "or":
        return _lazy_or(condition, text, lambda part: lazy_filter(part, text, False))
    return lazy_value(condition, text)


def chain(parts: list[Condition], text: Text, is_whole: bool = True) -> str:
    """All of some conditions; one that asks after those without, in the order given.

    DuckDB may evaluate an operand of AND where another one is false, but moves those that do not
    ask to where they leave out rows early: these stand outside and inside of the CASE.
    """
    asking = [part for part in parts if part.asks]
    if not asking:
        return " AND ".join(f"({text(part.range)})" for part in parts)
    shown = ""
    for part in reversed(asking):
        value = lazy_filter(part, text, False)
        shown = f"CASE WHEN {value} THEN {shown} ELSE false END" if shown else f"({value})"
    return _behind_others(parts, text, shown, is_whole)


def _behind_others(parts: list[Condition], text: Text, shown: str, is_whole: bool = True) -> str:
    """What asks, where all that does not ask is true."""
    others = [part for part in parts if not part.asks]
    for part in reversed(others):
        shown = f"CASE WHEN {text(part.range)} THEN {shown} ELSE false END"
    free = [f"({text(part.range)})" for part in others if is_whole and not part.has_query]
    return " AND ".join([*free, shown])


def _lazy_or(condition: Condition, text: Text, inner: Callable[[Condition], str]) -> str:
    free = [part for part in condition.parts if not part.asks]
    asking = [part for part in condition.parts if part.asks]
    # the operands one after the other, and all of them again where none was true
    shown = " OR ".join(f"({text(part.range)})" for part in free)
    last = " OR ".join(f"({inner(part)})" for part in asking[-1:])
    for part in reversed(asking[:-1]):
        value = inner(part)
        last = f"CASE WHEN ({value}) THEN true ELSE ({value}) OR ({last}) END"
    if not free:
        return last
    return f"CASE WHEN {shown} THEN true ELSE {shown} OR ({last}) END"


def lazy_value(condition: Condition, text: Text) -> str:
    """A text with the same value, NULL too."""
    if condition.kind == "or":
        return _lazy_or(condition, text, lambda part: lazy_value(part, text))
    if condition.kind == "not":
        return f"NOT ({lazy_value(condition.parts[0], text)})"
    if condition.kind == "and":
        parts = sorted(condition.parts, key=lambda part: part.asks)
        shown = ""
        for part in reversed(parts):
            value = lazy_value(part, text)
            if not shown:
                shown = f"({value})"
            else:
                shown = f"CASE WHEN NOT ({value}) THEN false ELSE ({value}) AND {shown} END"
        return shown
    return text(condition.range)


Missing = Callable[[Condition], str]


def missing_text(condition: Condition, text: Text, missing: Missing) -> str:
    """The number of the first row to ask that the value depends on, NULL if it is known.

    Args:
        missing: that of the calls of a leaf.
    """
    if condition.kind == "leaf":
        return missing(condition)
    if condition.kind == "not":
        return missing_text(condition.parts[0], text, missing)
    decides = "{0}" if condition.kind == "or" else "NOT ({0})"
    shown = "NULL"
    free_first = sorted(condition.parts, key=lambda part: part.asks)
    for part in free_first[::-1]:
        own = lazy_value(part, text)
        settled = decides.format(own)
        if not part.asks:
            shown = f"CASE WHEN {settled} THEN NULL ELSE {shown} END"
            continue
        found = missing_text(part, text, missing)
        if shown == "NULL":
            shown = found
        else:
            shown = (
                f"CASE WHEN {found} IS NOT NULL THEN {found} WHEN {settled} THEN NULL "
                f"ELSE {shown} END"
            )
    return shown


def passing_chain(parts: list[Condition], text: Text, missing: Missing, value: str = "true") -> str:
    """As `chain`, but true as soon as something is missing.

    Args:
        value: "true", or "number" for the number of the row to ask, NULL if nothing is missing.
    """
    asking = [part for part in parts if part.asks]
    is_number = value == "number"
    shown = "NULL" if is_number else "true"
    otherwise = "NULL" if is_number else "false"
    for part in reversed(asking):
        found = missing_text(part, text, missing)
        then = found if is_number else "true"
        shown = (
            f"CASE WHEN {found} IS NOT NULL THEN {then} WHEN {lazy_filter(part, text, False)} "
            f"THEN {shown} ELSE {otherwise} END"
        )
    if is_number:
        return shown
    return _behind_others(parts, text, shown)


def evaluated(parts: list[Condition], text: Text, look: Missing, passes: bool) -> str:
    """What does not ask, and a look at what does, whatever answers say.

    Args:
        look: a number, from 0 on or NULL, for which all calls of a leaf are looked at.
        passes: whether all rows that were looked at pass, or none.
    """
    looks = [_looks(part, text, look) for part in parts if part.asks]
    shown = f"(greatest(0, {', '.join(looks)}) {'>=' if passes else '<'} 0)"
    return _behind_others(parts, text, shown)


def _looks(condition: Condition, text: Text, look: Missing) -> str:
    if condition.kind == "leaf":
        return look(condition)
    shown = f"greatest(0, {', '.join(_looks(p, text, look) for p in condition.parts if p.asks)})"
    if condition.kind == "not":
        return shown
    decides = "{0}" if condition.kind == "or" else "NOT ({0})"
    for part in condition.parts:
        if not part.asks:
            shown = f"CASE WHEN {decides.format(text(part.range))} THEN NULL ELSE {shown} END"
    return shown
