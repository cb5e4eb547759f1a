# SPDX-License-Identifier: Apache-2.0
"""Where the queries of a statement and their clauses are in its text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import sqlglot
from sqlglot.tokens import Token, TokenType

from vllm_relay.tables.sql.expressions import DIALECT, fold

Range = tuple[int, int]
"""Numbers of the first token and of the one after the last."""

_OPEN = (TokenType.L_PAREN, TokenType.L_BRACE, TokenType.L_BRACKET)
_CLOSE = (TokenType.R_PAREN, TokenType.R_BRACE, TokenType.R_BRACKET)
_SET_OPERATIONS = (TokenType.UNION, TokenType.EXCEPT, TokenType.INTERSECT)
_CLAUSES = {
    TokenType.SELECT: "select",
    TokenType.FROM: "from",
    TokenType.WHERE: "where",
    TokenType.GROUP_BY: "group",
    TokenType.HAVING: "having",
    TokenType.QUALIFY: "qualify",
    TokenType.WINDOW: "window",
    TokenType.ORDER_BY: "order",
    TokenType.LIMIT: "limit",
    TokenType.OFFSET: "offset",
}
_ENDS = ("order", "limit", "offset", "sample")
_QUERY_STARTS = (TokenType.SELECT, TokenType.FROM, TokenType.WITH)
# the order in which what stands in a clause decides about the rows of the ones after it
_EVALUATION = (
    *("from", "where", "group", "having", "window", "qualify"),
    *("order", "select", "limit", "offset", "sample"),
)


@dataclass(eq=False)
class Select:
    """A SELECT of a query.

    Attributes:
        range: of its tokens.
        clauses: the ranges after the keywords.
        keywords: the tokens of these.
        query: that it is a part of.
    """

    range: Range
    clauses: dict[str, Range]
    keywords: dict[str, int]
    query: Query
    nested: dict[str, list[Query]] = field(default_factory=dict)


@dataclass(eq=False)
class Query:
    """A query, in brackets or the statement itself.

    Attributes:
        range: of its tokens, without the brackets.
        ctes: names and queries of its WITH.
        selects: one, or those of a set operation.
        above: the SELECT in which it stands.
        clause: of that one.
    """

    range: Range
    above: Select | None
    clause: str
    ctes: list[tuple[str, Query]] = field(default_factory=list)
    selects: list[Select] = field(default_factory=list)
    is_recursive: bool = False
    with_range: Range | None = None
    owner: Query | None = None
    is_set: bool = False

    @property
    def parent(self) -> Query | None:
        return self.owner if self.above is None else self.above.query


class Structure:
    """
    Attributes:
        tokens: of it.
        queries: outermost ones.

    Raises:
        TokenError: it cannot be read at all.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[Token] = sqlglot.tokenize(text, dialect=DIALECT)
        self.match: dict[int, int] = {}
        opened: list[int] = []
        for number, token in enumerate(self.tokens):
            if token.token_type in _OPEN:
                opened.append(number)
            elif token.token_type in _CLOSE and opened:
                self.match[opened.pop()] = number
        self.all_queries: list[Query] = []
        self.queries = self._outermost()

    def span(self, tokens: Range) -> tuple[int, int]:
        """Begin and end of tokens in the text."""
        begin, end = tokens
        if begin >= end:
            at = self.tokens[begin - 1].end + 1 if begin else 0
            return at, at
        return self.tokens[begin].start, self.tokens[end - 1].end + 1

    def text_of(self, tokens: Range) -> str:
        begin, end = self.span(tokens)
        return self.text[begin:end]

    def flat(self, tokens: Range) -> Iterator[int]:
        """Numbers of the tokens that are not inside brackets; brackets that open are among them."""
        number, end = tokens
        while number < end:
            yield number
            number = self.match.get(number, number) + 1

    def is_type(self, number: int, *types: TokenType) -> bool:
        return 0 <= number < len(self.tokens) and self.tokens[number].token_type in types

    def word(self, number: int) -> str:
        """A token in capitals; "" if there is none or it is quoted."""
        if not 0 <= number < len(self.tokens):
            return ""
        token = self.tokens[number]
        quoted = token.token_type in (TokenType.IDENTIFIER, TokenType.STRING)
        return "" if quoted else token.text.upper()

    def split(self, tokens: Range, separator: TokenType = TokenType.COMMA) -> list[Range]:
        """The parts between separators that are not inside brackets."""
        parts: list[Range] = []
        begin = tokens[0]
        for number in self.flat(tokens):
            if self.tokens[number].token_type == separator:
                parts.append((begin, number))
                begin = number + 1
        return [*parts, (begin, tokens[1])]

    def starts_query(self, number: int) -> bool:
        """Whether a bracket opens a query."""
        return (
            self.is_type(number, TokenType.L_PAREN)
            and number in self.match
            and self.is_type(number + 1, *_QUERY_STARTS)
        )

    def _outermost(self) -> list[Query]:
        """The query that the statement is or ends with, else those in its brackets."""
        everything = (0, len(self.tokens))
        for number in self.flat(everything):
            if self.is_type(number, *_QUERY_STARTS) and self._begins_query(number):
                before = self._queries_in((0, number), None, "")
                end = self._end_of_query(number)
                after = self._queries_in((end, everything[1]), None, "")
                return [*before, *after, self._query((number, end), None, "")]
        return self._queries_in(everything, None, "")

    def _end_of_query(self, begin: int) -> int:
        """Where what follows the query of an INSERT or CREATE TABLE begins."""
        end = len(self.tokens)
        for number in self.flat((begin, end)):
            word, after = self.word(number), self.word(number + 1)
            if number > begin and (
                word == "RETURNING"
                or (word == "ON" and after == "CONFLICT")
                or (word == "WITH" and after in ("NO", "DATA"))
            ):
                return number
        return end

    @property
    def change_where(self) -> Range | None:
        """The condition of UPDATE or DELETE."""
        if self.word(0) not in ("UPDATE", "DELETE"):
            return None
        begin = None
        for number in self.flat((0, len(self.tokens))):
            if self.is_type(number, TokenType.WHERE):
                begin = number + 1
            if begin is not None and self.word(number) == "RETURNING":
                return begin, number
        return None if begin is None else (begin, len(self.tokens))

    def _begins_query(self, number: int) -> bool:
        if self.word(0) in ("UPDATE", "DELETE", "MERGE", "COPY"):
            return False
        if number == 0:
            words = [self.word(other) for other in self.flat((0, len(self.tokens)))]
            is_change = any(word in ("INSERT", "UPDATE", "DELETE", "MERGE") for word in words)
            return not (words[0] == "WITH" and is_change)
        if self.is_type(number, TokenType.SELECT):
            return True
        return self.is_type(number - 1, TokenType.ALIAS, TokenType.R_PAREN) and self.is_type(
            number, TokenType.WITH, TokenType.FROM
        )

    def _queries_in(self, tokens: Range, above: Select | None, clause: str) -> list[Query]:
        found: list[Query] = []
        number, end = tokens
        while number < end:
            if self.starts_query(number):
                closing = self.match[number]
                found.append(self._query((number + 1, closing), above, clause))
                number = closing
            number += 1
        return found

    def _query(
        self, tokens: Range, above: Select | None, clause: str, owner: Query | None = None
    ) -> Query:
        query = Query(tokens, above, clause, owner=owner)
        self.all_queries.append(query)
        begin, end = tokens
        if self.is_type(begin, TokenType.WITH):
            begin = self._ctes(query)
            query.with_range = (tokens[0], begin)
        edges = [begin]
        for number in self.flat((begin, end)):
            after_star = self.is_type(number - 1, TokenType.STAR)
            if self.is_type(number, *_SET_OPERATIONS) and not after_star:
                edges.append(number)
        query.is_set = len(edges) > 1
        for first, last in zip(edges, [*edges[1:], end], strict=True):
            start = first
            while start < last and not self.is_type(start, TokenType.SELECT, TokenType.FROM):
                start = self.match.get(start, start) + 1
            if start < last:
                query.selects.append(self._select((start, last), query))
            else:
                for inner in self._queries_in((first, last), None, ""):
                    inner.owner = query
                    query.selects += inner.selects
        return query

    def _ctes(self, query: Query) -> int:
        number = query.range[0] + 1
        if self.word(number) == "RECURSIVE":
            query.is_recursive = True
            number += 1
        while number < query.range[1]:
            name = self.tokens[number].text
            while number < query.range[1] and not self.starts_query(number):
                number = self.match.get(number, number) + 1
            if number >= query.range[1]:
                return number
            closing = self.match[number]
            query.ctes.append((name, self._query((number + 1, closing), None, "with", query)))
            number = closing + 1
            if not self.is_type(number, TokenType.COMMA):
                break
            number += 1
        return number

    def _select(self, tokens: Range, query: Query) -> Select:
        found: list[tuple[str, int]] = []
        for number in self.flat(tokens):
            clause = self._clause_at(number)
            if clause and not any(clause == name for name, _ in found):
                found.append((clause, number))
        clauses: dict[str, Range] = {}
        ends = [number for _, number in found[1:]] + [tokens[1]]
        for (name, number), end in zip(found, ends, strict=True):
            clauses[name] = (number + (2 if name == "sample" else 1), end)
        select = Select(tokens, clauses, dict(found), query)
        for name in _EVALUATION:
            if name in clauses:
                select.nested[name] = self._queries_in(clauses[name], select, name)
        return select

    def _clause_at(self, number: int) -> str | None:
        token = self.tokens[number]
        if self.is_type(number - 1, TokenType.DOT) or self.is_type(number + 1, TokenType.DOT):
            return None
        if token.token_type == TokenType.USING and self.word(number + 1) == "SAMPLE":
            return "sample"
        if token.token_type == TokenType.FROM and self.is_type(number - 1, TokenType.DISTINCT):
            is_compared = self.is_type(number - 2, TokenType.IS, TokenType.NOT)
            return None if is_compared else "from"
        return _CLAUSES.get(token.token_type)

    def in_order(self) -> Iterator[tuple[Select | None, str, Range]]:
        """Ranges of the statement, what decides about others before these.

        Ranges of nested queries come before those in which they are, and are inside them too.
        """
        for query in self.queries:
            yield from self._in_order(query)
        if self.change_where is not None:
            yield None, "where", self.change_where
        yield None, "", (0, len(self.tokens))

    def _in_order(self, query: Query) -> Iterator[tuple[Select | None, str, Range]]:
        for _, inner in query.ctes:
            yield from self._in_order(inner)
        for select in query.selects:
            has_limit = "limit" in select.clauses or "qualify" in select.clauses
            names = [name for name in _EVALUATION if name in select.clauses]
            if not has_limit and "order" in names and "select" in names:
                names.remove("order")
                names.insert(names.index("select") + 1, "order")
            for name in names:
                for inner in select.nested[name]:
                    yield from self._in_order(inner)
                yield select, name, select.clauses[name]

    def innermost(self, number: int) -> tuple[Select | None, str]:
        """The SELECT and its clause in which a token is."""
        best: tuple[Select | None, str] = (None, "")
        size = len(self.tokens) + 1
        for query in self.all_queries:
            for select in query.selects:
                for name, (begin, end) in select.clauses.items():
                    if begin <= number < end and end - begin < size:
                        best, size = (select, name), end - begin
        return best

    def cte_names(self) -> list[str]:
        return [fold(name) for query in self.all_queries for name, _ in query.ctes]


def select_items(structure: Structure, select: Select) -> list[Range]:
    """The items of a select list."""
    begin, end = select.clauses["select"]
    if structure.is_type(begin, TokenType.DISTINCT):
        begin += 1
        if structure.is_type(begin, TokenType.ON):
            begin = structure.match[begin + 1] + 1
    elif structure.is_type(begin, TokenType.ALL):
        begin += 1
    return structure.split((begin, end))
