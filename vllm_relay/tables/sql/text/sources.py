# SPDX-License-Identifier: Apache-2.0
"""The tables that a FROM reads."""

from __future__ import annotations

from dataclasses import dataclass

from sqlglot.tokens import TokenType

from vllm_relay.tables.sql.text.structure import Range, Select, Structure

JOIN_WORDS = {
    *("JOIN", "LEFT", "RIGHT", "FULL", "INNER", "CROSS", "SEMI", "ANTI", "ASOF", "NATURAL"),
    *("POSITIONAL", "OUTER"),
}
_AFTER_SOURCE = {"ON", "USING", "TABLESAMPLE", "PIVOT", "UNPIVOT", "AT", "WITH", *JOIN_WORDS}


@dataclass(frozen=True)
class Source:
    """
    Attributes:
        range: of the table, with its alias.
        alias: as it is written; "" if it has none.
        join: words before it, "" for the first one, "," after a comma.
        condition: tokens of ON.
        using: tokens in the brackets of USING.
        is_query: whether it is a query in brackets.
    """

    range: Range
    alias: str
    join: str
    condition: Range | None
    using: Range | None
    is_query: bool


def sources(structure: Structure, select: Select) -> list[Source]:
    """Those of a SELECT; [] if it is not certain what they are."""
    if "from" not in select.clauses:
        return []
    tokens = select.clauses["from"]
    edges: list[tuple[str, int, int]] = [("", tokens[0], tokens[0])]
    words: list[str] = []
    begin = tokens[0]
    for number in structure.flat(tokens):
        if structure.is_type(number, TokenType.COMMA):
            edges.append((",", number, number + 1))
            words = []
        elif is_join_word(structure, number):
            if not words:
                begin = number
            words.append(structure.word(number))
            if words[-1] == "JOIN":
                edges.append((" ".join(words), begin, number + 1))
                words = []
    found: list[Source] = []
    for (join, _, start), after in zip(edges, [*edges[1:], ("", tokens[1], 0)], strict=True):
        source = _source(structure, join, (start, after[1]))
        if source is None:
            return []
        found.append(source)
    return found


def is_join_word(structure: Structure, number: int) -> bool:
    return (
        structure.word(number) in JOIN_WORDS
        and not structure.is_type(number + 1, TokenType.L_PAREN, TokenType.DOT)
        or structure.word(number) == "JOIN"
    )


def _source(structure: Structure, join: str, tokens: Range) -> Source | None:
    number, end = tokens
    if structure.word(number) == "LATERAL":
        number += 1
    if number >= end:
        return None
    is_query = structure.starts_query(number)
    if structure.is_type(number, TokenType.L_PAREN):
        if not is_query:
            return None
        number = structure.match[number] + 1
        alias = ""
    else:
        alias = structure.text_of((number, number + 1))
        number += 1
        while structure.is_type(number, TokenType.DOT):
            alias = structure.text_of((number + 1, number + 2))
            number += 2
        if structure.is_type(number, TokenType.L_PAREN):
            number = structure.match[number] + 1
    if number < end and structure.is_type(number, TokenType.ALIAS):
        number += 1
        alias = structure.text_of((number, number + 1))
        number += 1
    elif number < end and structure.word(number) not in _AFTER_SOURCE:
        alias = structure.text_of((number, number + 1))
        number += 1
    if number < end and structure.is_type(number, TokenType.L_PAREN):
        number = structure.match[number] + 1
    range_ = (tokens[0], number)
    condition = using = None
    for at in structure.flat((number, end)):
        if structure.is_type(at, TokenType.ON):
            condition = (at + 1, end)
            break
        if structure.is_type(at, TokenType.USING) and structure.is_type(at + 1, TokenType.L_PAREN):
            using = (at + 2, structure.match[at + 1])
    return Source(range_, alias, join, condition, using, is_query)


def on_conditions(structure: Structure, tokens: Range) -> list[Range]:
    """Conditions of the joins of a FROM."""
    found: list[Range] = []
    begin: int | None = None
    for number in structure.flat(tokens):
        ends = is_join_word(structure, number) or structure.is_type(number, TokenType.COMMA)
        if begin is not None and ends:
            found.append((begin, number))
            begin = None
        if structure.is_type(number, TokenType.ON):
            begin = number + 1
        if (
            structure.is_type(number, TokenType.L_PAREN)
            and begin is None
            and not structure.starts_query(number)
        ):
            found += on_conditions(structure, (number + 1, structure.match.get(number, number)))
    if begin is not None:
        found.append((begin, tokens[1]))
    return found
