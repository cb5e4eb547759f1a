# SPDX-License-Identifier: Apache-2.0
"""The calls of a statement, found in its text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import sqlglot
from sqlglot import exp
from sqlglot.errors import ParseError
from sqlglot.tokens import TokenType

from vllm_relay.tables.images.store import ImageStore
from vllm_relay.tables.question import Question
from vllm_relay.tables.sql.calls import Field, read_call
from vllm_relay.tables.sql.errors import SqlError
from vllm_relay.tables.sql.expressions import DIALECT, FUNCTION, is_call, sql_of
from vllm_relay.tables.sql.text.structure import Range, Select, Structure

StarNames = Callable[[Select | None, str], list[str]]


@dataclass(frozen=True)
class FieldText:
    """
    Attributes:
        name: in the prompt.
        range: tokens of its value; None where the value is `text`.
        text: of the value, without calls.
    """

    name: str
    range: Range | None
    text: str = ""


@dataclass
class Site:
    """Calls that are written alike.

    Attributes:
        number: of it, in the order in which sites are asked.
        text: for people.
        question: of every row.
    """

    number: int
    text: str
    question: Question


@dataclass(eq=False)
class Call:
    """A place of a call.

    Attributes:
        range: of its tokens.
        site: what it asks.
        fields: in the order of the question's.
        select: in which it stands.
        clause: of that one.
        key: a text that gives the key, instead of the fields.
        column: the name of the column that is that.
        names: of the columns that are keys, if it is a star.
    """

    range: Range
    site: Site
    fields: list[FieldText]
    select: Select | None
    clause: str
    key: str | None = None
    column: str = ""
    names: list[str] | None = None


def find_calls(structure: Structure) -> list[Range]:
    """Ranges of the calls, outer ones before those in their fields."""
    found: list[Range] = []
    for number, token in enumerate(structure.tokens):
        is_name = token.text.lower() == FUNCTION and token.token_type in (
            TokenType.VAR,
            TokenType.IDENTIFIER,
        )
        if is_name and structure.is_type(number + 1, TokenType.L_PAREN):
            end = structure.match.get(number + 1)
            if end is None:
                raise SqlError("a statement with llm() cannot be read: a bracket is not closed")
            if not structure.is_type(number - 1, TokenType.DOT):
                found.append((number, end + 1))
    return found


def read_calls(structure: Structure, star_names: StarNames, images: ImageStore) -> Iterator[Call]:
    """The calls, in the order in which they can be asked.

    Args:
        star_names: columns that ``*`` (or ``t.*``, if given ``t.``) of a SELECT stands for.
        images: of the fields.

    Raises:
        SqlError: a call is not called as it should be.
    """
    ranges = find_calls(structure)
    sites: dict[str, Site] = {}
    placed: set[Range] = set()
    for _, _, (begin, end) in structure.in_order():
        inside = [own for own in ranges if begin <= own[0] < end and own not in placed]
        # those in the fields of others first
        for own in sorted(inside, key=lambda other: (other[1], -other[0])):
            placed.add(own)
            yield _read(structure, own, sites, star_names, images)


def _read(
    structure: Structure,
    tokens: Range,
    sites: dict[str, Site],
    star_names: StarNames,
    images: ImageStore,
) -> Call:
    node = _parsed(structure, tokens)
    select, clause = structure.innermost(tokens[0])
    stars: list[str] = []

    def star_fields(star: exp.Expr) -> list[Field]:
        table = sql_of(star)[:-1]
        stars.append(table)
        names = star_names(select, table)
        columns = [exp.column(exp.to_identifier(name, quoted=True)) for name in names]
        return [Field(name, column) for name, column in zip(names, columns, strict=True)]

    call = read_call(node, star_fields, images)
    text = sql_of(node)
    written = " ".join(token.text for token in structure.tokens[tokens[0] : tokens[1]])
    site = sites.setdefault(written, Site(len(sites), text, call.question))
    if stars:
        texts = [stars[0] + sql_of(part.expression) for part in call.fields]
        fields = [
            FieldText(part.name, None, shown)
            for part, shown in zip(call.fields, texts, strict=True)
        ]
    else:
        fields = _field_texts(structure, tokens, call.fields)
    return Call(tokens, site, fields, select, clause)


def _parsed(structure: Structure, tokens: Range) -> exp.Anonymous:
    begin, end = structure.span(tokens)
    # spaces keep lines and columns
    before = "".join(c if c == "\n" else " " for c in structure.text[:begin])
    try:
        node = sqlglot.parse_one(before + structure.text[begin:end], dialect=DIALECT)
    except ParseError as error:
        raise SqlError(f"a statement with llm() cannot be read: {error}") from None
    if not isinstance(node, exp.Anonymous) or not is_call(node):
        raise SqlError(f"a call of llm() cannot be read: {structure.text[begin:end]}")
    return node


def _field_texts(structure: Structure, tokens: Range, fields: tuple[Field, ...]) -> list[FieldText]:
    braces = [
        part
        for part in structure.split((tokens[0] + 2, tokens[1] - 1))
        if structure.is_type(part[0], TokenType.L_BRACE)
    ]
    if not braces:
        return [FieldText(part.name, None, sql_of(part.expression)) for part in fields]
    ranges = structure.split((braces[0][0] + 1, braces[0][1] - 1))
    if len(ranges) != len(fields):
        return [FieldText(part.name, None, sql_of(part.expression)) for part in fields]
    texts: list[FieldText] = []
    for part, (begin, end) in zip(fields, ranges, strict=True):
        # {name: expression}
        colon = structure.is_type(begin + 1, TokenType.COLON)
        texts.append(FieldText(part.name, (begin + 2 if colon else begin, end)))
    return texts
