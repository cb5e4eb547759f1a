# SPDX-License-Identifier: Apache-2.0
"""The calls of a statement, found in its text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

import sqlglot
from sqlglot import exp
from sqlglot.errors import ParseError, SqlglotError
from sqlglot.tokens import TokenType

from vllm_relay.tables.images import ImageStore
from vllm_relay.tables.question import Question
from vllm_relay.tables.semantic.record_lists import RECORDS
from vllm_relay.tables.sql.calls import Field, read_call
from vllm_relay.tables.sql.expressions import (
    AGGREGATE,
    DIALECT,
    FUNCTION,
    FUNCTIONS,
    SqlError,
    has_call,
    is_call,
    sql_of,
)
from vllm_relay.tables.sql.text.structure import Range, Select, Structure
from vllm_relay.tables.texts import quoted

StarNames = Callable[[Select | None, str], list[str]]


@dataclass(frozen=True)
class FieldText:
    """
    Attributes:
        name: in the prompt.
        parts: of its value, one after the other: tokens, which may hold calls, and texts.
    """

    name: str
    parts: tuple[Range | str, ...]


@dataclass
class Site:
    """Calls that are written alike.

    Attributes:
        number: of it, in the order in which sites are asked.
        text: for people.
        question: of every row; of an aggregate, about a list of records.
        function: that is called.
    """

    number: int
    text: str
    question: Question
    function: str = FUNCTION

    @property
    def is_aggregate(self) -> bool:
        return self.function == AGGREGATE


@dataclass(eq=False)
class Call:
    """A place of a call.

    Attributes:
        range: of its tokens, with FILTER and OVER.
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
        is_name = token.text.lower() in FUNCTIONS and token.token_type in (
            TokenType.VAR,
            TokenType.IDENTIFIER,
        )
        if is_name and structure.is_type(number + 1, TokenType.L_PAREN):
            end = structure.match.get(number + 1)
            if end is None:
                raise SqlError("a statement with llm() cannot be read: a bracket is not closed")
            if not structure.is_type(number - 1, TokenType.DOT):
                found.append((number, _modified(structure, number, end + 1).end))
    return found


def read_calls(structure: Structure, star_names: StarNames, images: ImageStore) -> Iterator[Call]:
    """The calls, in the order in which they can be asked.

    Args:
        star_names: columns that ``*`` (or ``t.*``, if given ``t.``) of a SELECT stands for.

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


@dataclass(frozen=True)
class _Modified:
    """A call with what SQL lets follow the arguments of an aggregate.

    Attributes:
        arguments: of the call.
        is_distinct: whether DISTINCT stands before them.
        order: of the rows, without its keyword; None where there is none.
        after: FILTER and OVER.
        end: of the whole.
    """

    arguments: Range
    is_distinct: bool
    order: Range | None
    after: Range
    end: int


def _modified(structure: Structure, begin: int, closed: int) -> _Modified:
    """
    Args:
        begin: the token of the function's name.
    """
    arguments = (begin + 2, closed - 1)
    if structure.tokens[begin].text.lower() != AGGREGATE:
        return _Modified(arguments, False, None, (closed, closed), closed)
    is_distinct = structure.is_type(begin + 2, TokenType.DISTINCT)
    first = arguments[0] + is_distinct
    order = next(
        (
            n
            for n in structure.flat((first, closed - 1))
            if structure.is_type(n, TokenType.ORDER_BY)
        ),
        None,
    )
    end = closed
    if structure.is_type(end, TokenType.FILTER) and end + 1 in structure.match:
        end = structure.match[end + 1] + 1
    if structure.is_type(end, TokenType.OVER):
        # a name or a window in brackets
        end = structure.match.get(end + 1, end + 1) + 1
    return _Modified(
        (first, closed - 1 if order is None else order),
        is_distinct,
        None if order is None else (order + 1, closed - 1),
        (closed, end),
        end,
    )


def _read(
    structure: Structure,
    tokens: Range,
    sites: dict[str, Site],
    star_names: StarNames,
    images: ImageStore,
) -> Call:
    closed = structure.match[tokens[0] + 1] + 1
    modified = _modified(structure, tokens[0], closed)
    node = _parsed(structure, (tokens[0], closed), modified)
    select, clause = structure.innermost(tokens[0])
    stars: list[str] = []

    def star_fields(star: exp.Expr) -> list[Field]:
        table = sql_of(star)[:-1]
        stars.append(table)
        names = star_names(select, table)
        columns = [exp.column(exp.to_identifier(name, quoted=True)) for name in names]
        return [Field(name, column) for name, column in zip(names, columns, strict=True)]

    function = node.name.lower()
    call = read_call(node, star_fields, images)
    written = " ".join(token.text for token in structure.tokens[tokens[0] : tokens[1]])
    text = sql_of(node) if function != AGGREGATE else structure.text_of(tokens)
    site = sites.setdefault(written, Site(len(sites), text, call.question, function))
    if stars:
        texts = [stars[0] + sql_of(part.expression) for part in call.fields]
        fields = [
            FieldText(part.name, (shown,)) for part, shown in zip(call.fields, texts, strict=True)
        ]
    else:
        fields = _field_texts(structure, modified.arguments, call.fields)
    if site.is_aggregate:
        fields = [_record_list(fields, modified)]
    return Call(tokens, site, fields, select, clause)


def _record_list(fields: list[FieldText], modified: _Modified) -> FieldText:
    """The JSON of the list of a group's records, the same whenever DuckDB makes it: where nothing
    else decides about their order, their values do."""
    pairs = [
        (", " * (number > 0), f"{quoted(field.name)}: ", *field.parts)
        for number, field in enumerate(fields)
    ]
    record = ("{", *chain.from_iterable(pairs), "}")
    before = "list(DISTINCT " if modified.is_distinct else "list("
    after = (" ", modified.after) if modified.after[0] < modified.after[1] else ()
    if modified.order is None:
        parts = ("to_json(list_sort(", before, *record, ")", *after, "))")
    else:
        order = (" ORDER BY ", modified.order, ", ", *record)
        parts = ("to_json(", before, *record, *order, ")", *after, ")")
    return FieldText(RECORDS, parts)


def _parsed(structure: Structure, tokens: Range, modified: _Modified) -> exp.Anonymous:
    """A call without what only aggregates have."""
    begin, end = structure.span(tokens)
    first, last = structure.span(modified.arguments)
    # spaces keep lines and columns
    before = "".join(c if c == "\n" else " " for c in structure.text[:begin])
    name = structure.text_of((tokens[0], tokens[0] + 2))
    gap = " " * (first - begin - len(name))
    text = f"{before}{name}{gap}{structure.text[first:last]})"
    try:
        node = sqlglot.parse_one(text, dialect=DIALECT)
    except ParseError as error:
        raise SqlError(f"a statement with llm() cannot be read: {error}") from None
    if not isinstance(node, exp.Anonymous) or not is_call(node):
        raise SqlError(f"a call of llm() cannot be read: {structure.text[begin:end]}")
    return node


def _field_texts(
    structure: Structure, arguments: Range, fields: tuple[Field, ...]
) -> list[FieldText]:
    braces = [
        part for part in structure.split(arguments) if structure.is_type(part[0], TokenType.L_BRACE)
    ]
    if not braces:
        return [FieldText(part.name, (sql_of(part.expression),)) for part in fields]
    ranges = structure.split((braces[0][0] + 1, braces[0][1] - 1))
    if len(ranges) != len(fields):
        return [FieldText(part.name, (sql_of(part.expression),)) for part in fields]
    texts: list[FieldText] = []
    for part, (begin, end) in zip(fields, ranges, strict=True):
        # {name: expression}
        colon = structure.is_type(begin + 1, TokenType.COLON)
        texts.append(FieldText(part.name, ((begin + 2 if colon else begin, end),)))
    return texts


def item_name(text: str) -> str | None:
    """The name of an item of a select list, if it has none of its own."""
    try:
        select = sqlglot.parse_one(f"SELECT {text}", dialect=DIALECT)
    except SqlglotError:
        return None
    items = select.expressions
    if len(items) != 1 or not has_call(items[0]) or isinstance(items[0], exp.Alias):
        return None
    if isinstance(items[0], exp.Star) or not isinstance(items[0], exp.Expr):
        return None
    return sql_of(items[0])
