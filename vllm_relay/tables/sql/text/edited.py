# SPDX-License-Identifier: Apache-2.0
"""A statement whose calls are functions over the answers that are known."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import duckdb
from sqlglot.tokens import TokenType

from vllm_relay.tables.sql.database import FunctionNames, columns
from vllm_relay.tables.sql.replay.answers import key_text
from vllm_relay.tables.sql.replay.functions import Functions
from vllm_relay.tables.sql.text.call_sites import Call, FieldText, Site, item_name, read_calls
from vllm_relay.tables.sql.text.conditions import (
    Condition,
    conjuncts,
    evaluated,
    lazy_filter,
    passing_chain,
    read_condition,
)
from vllm_relay.tables.sql.text.sources import on_conditions
from vllm_relay.tables.sql.text.splices import Splice, Splices
from vllm_relay.tables.sql.text.structure import Query, Range, Select, Structure, select_items
from vllm_relay.tables.texts import quoted

_CALL_RANK, _CONDITION_RANK, _ITEM_RANK, _CLAUSE_RANK, _QUERY_RANK = 9, 5, 3, 2, 1


class Edited:
    """
    Args:
        text: of a statement, as it was given.

    Attributes:
        calls: in the order in which they can be asked.

    Raises:
        SqlError: a call is not called as it should be.
    """

    def __init__(
        self, connection: duckdb.DuckDBPyConnection, functions: Functions, text: str
    ) -> None:
        self.connection = connection
        self.functions = functions
        self.structure = Structure(text)
        self.splices = Splices(text)
        self.calls: list[Call] = []
        self.call_splices: dict[int, Splice] = {}
        self.anchors: dict[int, str] = {}
        self._guarded: set[int] = set()
        self._is_shown = False
        self._is_looked_at = False
        self._stars: dict[Range, list[Call]] = {}
        # conditions that let through what they cannot decide yet
        self.passing: set[Range] = set()
        # conditions that are only evaluated
        self.lets_all_through: set[Range] = set()
        self.lets_none_through: set[Range] = set()
        # whether an expression reads answers of other ones, where an estimate wants to know
        self.reads_answers: Callable[[Range], bool] = lambda tokens: False
        self.conditions: dict[tuple[int, int], Condition] = {}
        for call in read_calls(self.structure, self._star_names, functions.images):
            self.calls.append(call)
            self.call_splices[id(call)] = self._add_call(call)
        for query in self.structure.all_queries:
            for select in query.selects:
                self._names(select)
        found = {call.site.number: call.site for call in self.calls}
        self._sites = [found[number] for number in sorted(found)]

    @cached_property
    def function_names(self) -> FunctionNames:
        """When they were first wanted."""
        return FunctionNames.of(self.connection)

    def add_conditions(self) -> None:
        """Have what asks in conditions evaluated last."""
        where = self.structure.change_where
        if where is not None and self._decides(where):
            self._condition(where)
        for query in self.structure.all_queries:
            for select in query.selects:
                self._conditions(select)
        self._filters()

    @property
    def sites(self) -> list[Site]:
        """By number."""
        return self._sites

    @property
    def site_order(self) -> list[int]:
        """Numbers of the sites, what decides about others first."""
        return list(dict.fromkeys(call.site.number for call in self.calls))

    def sort_calls(self) -> None:
        """Put the calls into the order in which they can be asked."""
        order: dict[int, int] = {}
        for _, _, (begin, end) in self.structure.in_order():
            inside = [c for c in self.calls if begin <= c.range[0] < end and id(c) not in order]
            for call in sorted(inside, key=lambda other: (other.range[1], -other.range[0])):
                order[id(call)] = len(order)
        self.calls.sort(key=lambda call: order[id(call)])

    def give_key(self, call: Call, name: str) -> None:
        """Have a call, or a reference, give the key of its row instead of the answer."""
        if call.names is not None:
            call.names.remove(name)
            if call.names:
                return
        self.calls = [other for other in self.calls if other is not call]
        if call.names is not None:
            # the star stays, with the columns that are still looked up
            return
        self.splices.remove(self.call_splices[id(call)])
        if call.key is None:
            self.call_splices[id(call)] = self._add(
                call.range, _CALL_RANK, lambda splice: self._key_text(call, splice)
            )

    def _key_text(self, call: Call, splice: Splice) -> str:
        if self._is_shown:
            return f"later({self.structure.text_of(call.range)})"
        return self.key(call, splice)

    def add_reference(
        self, tokens: Range, call: Call, name: str, key: str, select: Select, clause: str,
        is_item: bool,
    ) -> None:  # fmt: skip
        """Look an answer up where a column that is its key is used."""
        made = Call(tokens, call.site, [], select, clause, key, name)
        self.calls.append(made)
        shown = f" AS {quoted(name)}" if is_item else ""
        self.call_splices[id(made)] = self._add_call(made, shown)

    def add_star(self, tokens: Range, call: Call, name: str, key: str, select: Select) -> None:
        """Look an answer up where a star stands for a column that is its key."""
        made = Call(tokens, call.site, [], select, "select", key, name, [name])
        self.calls.append(made)
        # several columns of one star share the splice of the first
        stars = self._stars.setdefault(tokens, [])
        stars.append(made)
        if len(stars) > 1:
            self.call_splices[id(made)] = self.call_splices[id(stars[0])]
            return

        def render(splice: Splice) -> str:
            shown = self.structure.text_of(tokens)
            asking = [one for one in stars if one.names]
            if not asking:
                return shown
            values = [f"{self._call_text(one)} AS {quoted(one.column)}" for one in asking]
            return f"{shown} REPLACE ({', '.join(values)})"

        self.call_splices[id(made)] = self._add(tokens, _CALL_RANK, render)

    def _call_text(self, call: Call, inside: Splice | None = None) -> str:
        if self._is_shown:
            is_call = call.key is None
            return self.structure.text_of(call.range) if is_call else f"answer({call.key})"
        anchors = self.anchors.get(call.range[0], "[]")
        key = self.key(call, inside)
        output, number = call.site.question.output, call.site.number
        return self.functions.call(output, number, key, anchors, not self._is_looked_at)

    def text(self, tokens: Range | None = None, inside: Splice | None = None) -> str:
        """The edited text of some tokens, of all by default."""
        if tokens is None:
            return self.splices.render(0, len(self.structure.text))
        return self.splices.render(*self.structure.span(tokens), inside)

    def shown(self) -> str:
        """The text for people: with the calls as they were written."""
        self._is_shown = True
        try:
            return self.text()
        finally:
            self._is_shown = False

    def key(self, call: Call, inside: Splice | None = None) -> str:
        if call.key is not None:
            return call.key
        return key_text([self._field(call, part, inside) for part in call.fields])

    def _field(self, call: Call, field: FieldText, inside: Splice | None) -> str:
        value = "".join(
            part if isinstance(part, str) else self.text(part, inside) for part in field.parts
        )
        images = call.site.question.images
        kind = None if images is None else images.kind_of(field.name)
        return value if kind is None else self.functions.image(kind, value)

    def _add_call(self, call: Call, after: str = "") -> Splice:
        return self._add(
            call.range, _CALL_RANK, lambda splice: self._call_text(call, splice) + after
        )

    def _add(self, tokens: Range, rank: int, render: Callable[[Splice], str]) -> Splice:
        return self.splices.add(*self.structure.span(tokens), rank, render)

    def asks(self, tokens: Range) -> bool:
        """Whether there is a call among tokens, not only in a subquery."""
        return any(
            tokens[0] <= call.range[0] < tokens[1] and not self._in_query(call.range[0], tokens)
            for call in self.calls
        )

    def _decides(self, tokens: Range) -> bool:
        return self.asks(tokens) or self.reads_answers(tokens)

    def _in_query(self, number: int, tokens: Range) -> bool:
        return any(
            tokens[0] < query.range[0] and query.range[0] <= number < query.range[1] <= tokens[1]
            for query in self.structure.all_queries
        )

    def calls_of(self, tokens: Range) -> list[Call]:
        """Calls of an expression, outside of its subqueries, those in fields first."""
        return [
            call
            for call in self.calls
            if tokens[0] <= call.range[0] < tokens[1] and not self._in_query(call.range[0], tokens)
        ]

    def calls_in(self, tokens: Range) -> list[Call]:
        return [call for call in self.calls if tokens[0] <= call.range[0] < tokens[1]]

    def missing(self, call: Call) -> str:
        """The number of the row that a call would ask about; NULL if that is known."""
        return self.functions.missing(call.site.number, self.key(call))

    def missing_of(self, condition: Condition) -> str:
        found = [self.missing(call) for call in self.calls_of(condition.range)]
        return f"coalesce({', '.join(found)})"

    def _conditions(self, select: Select) -> None:
        for clause in ("where", "having", "qualify"):
            if clause in select.clauses and self._decides(select.clauses[clause]):
                self._condition(select.clauses[clause], clause)
        if "from" in select.clauses:
            for tokens in on_conditions(self.structure, select.clauses["from"]):
                if self._decides(tokens):
                    self._condition(tokens)

    def _filters(self) -> None:
        structure = self.structure
        for number, token in enumerate(structure.tokens):
            if token.token_type == TokenType.FILTER and structure.is_type(
                number + 2, TokenType.WHERE
            ):
                tokens = (number + 3, structure.match.get(number + 1, number + 3))
                if self._decides(tokens):
                    self._condition(tokens, "filter")
                self._guard_arguments(number, tokens)

    def _guard_arguments(self, number: int, condition: Range) -> None:
        """An aggregate asks only about the rows of its FILTER."""
        closing = number - 1
        opening = next((i for i, end in self.structure.match.items() if end == closing), None)
        if opening is None or self._decides(condition) or opening in self._guarded:
            return
        self._guarded.add(opening)
        inner = self.calls_of((opening + 1, closing))
        for call in inner:
            if not any(
                other is not call and other.range[0] < call.range[0] < other.range[1]
                for other in inner
            ):

                def render(splice: Splice) -> str:
                    inner = self.splices.render(splice.begin, splice.end, splice)
                    return f"CASE WHEN {self.text(condition)} THEN {inner} END"

                self._add(call.range, _CALL_RANK - 1, render)

    def _look(self, splice: Splice, is_of_groups: bool) -> Callable[[Condition], str]:
        """A number for which the calls of a leaf are looked at, also those of aggregates and those
        whose answers it reads."""

        def look(condition: Condition) -> str:
            is_asked = self.asks(condition.range) and not is_of_groups
            looks = [self.missing_of(condition)] if is_asked else []
            if not is_asked or self.reads_answers(condition.range):
                self._is_looked_at = is_asked
                looks.append(f"length(({self.text(condition.range, splice)})::VARCHAR)")
                self._is_looked_at = False
            return f"greatest({', '.join(looks)})"

        return look

    def look_at(self, tokens: Range) -> None:
        """Look at all calls of an expression before it chooses among them."""

        def render(splice: Splice) -> str:
            looks = ", ".join(self.missing(call) for call in self.calls_of(tokens))
            self._is_looked_at = True
            inner = self.splices.render(splice.begin, splice.end, splice)
            self._is_looked_at = False
            return f"CASE WHEN greatest(0, {looks}) >= 0 THEN {inner} END"

        self._add(tokens, _CALL_RANK - 2, render)

    def _condition(self, tokens: Range, clause: str = "on") -> None:
        # DuckDB moves conjuncts that do not ask, which helps
        is_whole = clause in ("on", "where")
        if tokens in self.conditions:
            return
        condition = read_condition(self.structure, tokens, self.asks)
        self.conditions[tokens] = condition

        def render(splice: Splice) -> str:
            passes = tokens in self.lets_all_through
            if passes or tokens in self.lets_none_through:
                parts = conjuncts(read_condition(self.structure, tokens, self._decides))
                look = self._look(splice, clause == "having")
                return evaluated(parts, lambda part: self.text(part, splice), look, passes)
            if tokens in self.passing:
                parts = conjuncts(condition)
                return passing_chain(parts, lambda part: self.text(part, splice), self.missing_of)
            return lazy_filter(condition, lambda part: self.text(part, splice), is_whole)

        self._add(tokens, _CONDITION_RANK, render)

    def _names(self, select: Select) -> None:
        """Names of items that ask, as they would be called with the text of the call."""
        if "select" not in select.clauses:
            return
        for tokens in select_items(self.structure, select):
            if tokens[0] >= tokens[1] or not self.asks(tokens):
                continue
            alone = next((call for call in self.calls if call.range == tokens), None)
            name = alone and alone.site.function
            name = name or item_name(self.structure.text_of(tokens))
            if name is None:
                continue

            def render(splice: Splice, name: str = name) -> str:
                return f" AS {quoted(name)}"

            end = self.structure.span(tokens)[1]
            self.splices.add(end, end, _ITEM_RANK, render)

    def replace(self, tokens: Range, rank: int, text: str) -> None:
        self._add(tokens, rank, lambda splice: text)

    def replace_query(self, query: Query, text: str) -> None:
        self._add(query.range, _QUERY_RANK, lambda splice: text)

    def replace_clause(self, select: Select, clause: str, text: str) -> None:
        """Replace a clause with its keyword."""
        tokens = (select.keywords[clause], select.clauses[clause][1])
        self._add(tokens, _CLAUSE_RANK, lambda splice: text)

    def add_filter(self, select: Select, conditions: list[str]) -> None:
        """More conditions of a SELECT's rows."""
        added = " AND ".join(f"({condition})" for condition in conditions)
        if "where" in select.clauses:
            where = select.clauses["where"]
            tokens = (select.keywords["where"], where[1])
            self._add(
                tokens,
                _CLAUSE_RANK,
                lambda splice: f"WHERE ({self.text(where, splice)}) AND {added} ",
            )
        else:
            end = self.structure.span(select.clauses["from"])[1]
            self.splices.add(end, end, _CLAUSE_RANK, lambda splice: f" WHERE {added} ")

    def context(self, query: Query, inner: str) -> str:
        """A query's text with what it may use of the queries around it."""
        child: Query | None = None
        above: Query | None = query
        while above is not None:
            ctes = [cte for _, cte in above.ctes]
            if child is not None and child in ctes:
                ctes = ctes[: ctes.index(child)]
            if ctes:
                assert above.with_range is not None
                tokens = (above.with_range[0], ctes[-1].range[1] + 1)
                inner = f"{self.text(tokens)} SELECT * FROM ({inner})"
            child, above = above, above.parent
        return inner

    def _star_names(self, select: Select | None, table: str) -> list[str]:
        source = ""
        query = None
        if select is not None and "from" in select.clauses:
            source = f"FROM {self.text(select.clauses['from'])}"
            query = select.query
        text = f"SELECT {table}* {source}"
        if query is not None:
            text = self.context(query, text)
        return columns(self.connection, text)
