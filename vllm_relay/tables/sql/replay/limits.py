# SPDX-License-Identifier: Apache-2.0
"""SELECTs with a LIMIT: only the rows up to it are asked about."""

from __future__ import annotations

from dataclasses import dataclass

from sqlglot.tokens import TokenType

from vllm_relay.tables.sql.database import is_valid
from vllm_relay.tables.sql.expressions import FUNCTIONS, fold
from vllm_relay.tables.sql.replay.replayed import Replayed
from vllm_relay.tables.sql.text.call_sites import Call
from vllm_relay.tables.sql.text.conditions import conjuncts, passing_chain
from vllm_relay.tables.sql.text.edited import Edited
from vllm_relay.tables.sql.text.structure import Range, Select, select_items

# rows of the first chunk, per row that is wanted
_CHUNK_ROWS_PER_WANTED = 2
_MIN_CHUNK_ROWS = 64
_WITHOUT_CALLS = ("from", "group", "having", "qualify", "order", "window")
_ALL_ROWS = 2**62
_HIDDEN_RANK = 4
# an item with one of these may not need its call
_CHOOSING = {"CASE", "COALESCE", "IF", "IFNULL", "NULLIF", "AND", "OR", "UNNEST", "LAMBDA"}


@dataclass
class Limited:
    """
    Attributes:
        select: with a LIMIT.
        limit: of it.
        offset: of it.
        calls: of its list, each of which a row of the result needs.
        where: tokens of its condition, if that asks.
    """

    select: Select
    limit: int
    offset: int
    calls: list[Call]
    where: Range | None


def limited(edited: Edited, select: Select) -> Limited | None:
    """None if the rows up to the LIMIT cannot be told from the others."""
    structure, clauses = edited.structure, select.clauses
    if select.query.is_set or "select" not in clauses:
        return None
    first = clauses["select"][0]
    is_distinct = structure.is_type(first, TokenType.DISTINCT)
    chooses_rows = is_distinct and structure.is_type(first + 1, TokenType.ON)
    if is_distinct and (not chooses_rows or edited.asks((first, structure.match[first + 2] + 1))):
        return None
    if "limit" not in clauses and not chooses_rows:
        return None
    limit = _number(edited, clauses["limit"]) if "limit" in clauses else _ALL_ROWS
    offset = 0
    if "offset" in clauses:
        offset = _number(edited, clauses["offset"])
    if limit < 0 or offset < 0:
        return None
    words = {structure.word(number) for number in range(*clauses["select"])}
    if "UNNEST" in words:
        return None
    if any(part in clauses and edited.asks(clauses[part]) for part in _WITHOUT_CALLS):
        return None
    if any(query.above is select for query in structure.all_queries
           if query.clause == "select" and edited.calls_in(query.range)):  # fmt: skip
        return None
    calls = edited.calls_of(clauses["select"])
    items = [item for item in select_items(structure, select) if edited.asks(item)]
    if "order" in clauses and _orders_by_answers(edited, clauses["order"], items):
        return None
    where = clauses.get("where")
    if where is None or not edited.asks(where):
        where = None
    names = {fold(structure.tokens[number].text) for number in range(*clauses["select"])
             if structure.is_type(number + 1, TokenType.L_PAREN)}  # fmt: skip
    computes = bool(names & edited.function_names.aggregates) or "OVER" in words
    if where is not None and (
        computes or chooses_rows or "group" in clauses or "qualify" in clauses
    ):
        return None
    if calls and (_CHOOSING & words or _in_aggregate(edited, items)):
        return None
    return Limited(select, limit, offset, calls, where)


def _number(edited: Edited, tokens: Range) -> int:
    text = edited.structure.text_of(tokens).strip()
    return int(text) if text.isdigit() else -1


def _orders_by_answers(edited: Edited, order: Range, items: list[Range]) -> bool:
    structure = edited.structure
    names = {*FUNCTIONS}
    for item in items:
        if structure.is_type(item[1] - 1, TokenType.VAR, TokenType.IDENTIFIER):
            names.add(fold(structure.tokens[item[1] - 1].text))
    for call in edited.calls:
        if any(item[0] <= call.range[0] < item[1] for item in items):
            names |= {fold(name) for name in call.names or []}
    for number in range(*order):
        token = structure.tokens[number]
        if fold(token.text) in names or token.token_type in (TokenType.ALL, TokenType.NUMBER):
            return True
    return False


def _in_aggregate(edited: Edited, items: list[Range]) -> bool:
    structure = edited.structure
    for begin, end in items:
        for number in range(begin, end):
            opening = number + 1
            if (
                fold(structure.tokens[number].text) in edited.function_names.aggregates
                and structure.is_type(opening, TokenType.L_PAREN)
                and edited.asks((opening + 1, structure.match.get(opening, opening)))
            ):
                return True
            if structure.word(number) == "OVER":
                return True
    return False


class LimitedRows:
    """Asks until the rows up to a LIMIT are certain.

    Args:
        num_seen: rows that a sample of the condition was asked about.
    """

    def __init__(self, replayed: Replayed, limited: Limited, num_seen: int) -> None:
        self._tables = replayed.tables
        self._edited = replayed.edited
        self._answers = replayed.answers
        self._ask = replayed.ask
        self._limited = limited
        self._num_seen = num_seen

    def table(self) -> str:
        """A table of the rows of the result."""
        wanted = self._limited.limit + self._limited.offset
        if not self._limited.limit:
            wanted = 0
        chunk = max(_MIN_CHUNK_ROWS, _CHUNK_ROWS_PER_WANTED * wanted)
        target = chunk
        while True:
            with_unknown = self._limited.where is not None
            num_rows = wanted + chunk if with_unknown else wanted
            self._answers.begin_pass()
            table = self._tables.create(self._text(num_rows))
            rows = self._tables.connection.execute(
                f"SELECT relay_where, relay_list FROM {table}"
            ).fetchall()
            certain, unknown = 0, []
            for number, _ in rows:
                if certain == wanted:
                    break
                if number is None:
                    certain += 1
                else:
                    unknown.append(number)
            if unknown:
                first = self._first_site
                later = [n for n in unknown if self._answers.numbered[n][0] not in first]
                if later:
                    unknown = later
                else:
                    if self._num_seen >= target:
                        more = (wanted - certain) * self._num_seen // max(certain, 1)
                        chunk = max(_MIN_CHUNK_ROWS, min(self._num_seen, more))
                        target = self._num_seen + chunk
                    unknown = unknown[: target - self._num_seen]
                    self._num_seen += len(unknown)
                self._tables.drop(table)
                self._answers.ask_numbers(unknown, self._ask)
                continue
            listed = [
                number
                for where, numbers in rows[self._limited.offset : wanted]
                if where is None
                for number in numbers
                if number is not None
            ]
            listed = listed if wanted else []
            if not listed:
                result = self._tables.create(
                    f"SELECT * EXCLUDE (relay_where, relay_list) FROM {table} "
                    f"WHERE relay_where IS NULL "
                    f"LIMIT {self._limited.limit} OFFSET {self._limited.offset}"
                )
                self._tables.drop(table)
                return result
            self._tables.drop(table)
            self._answers.ask_numbers(listed, self._ask)

    @property
    def _first_site(self) -> set[int]:
        where = self._limited.where
        if where is None:
            return set()
        parts = conjuncts(self._edited.conditions[where])
        first = next(part for part in parts if part.asks)
        return {call.site.number for call in self._edited.calls_of(first.range)}

    def _text(self, num_rows: int) -> str:
        edited, select = self._edited, self._limited.select
        where = self._limited.where
        number = "NULL::BIGINT"
        if where is not None:
            conditions = conjuncts(edited.conditions[where])
            number = passing_chain(conditions, edited.text, edited.missing_of, "number")
        listed = ", ".join(self._missing_of_list(call) for call in self._limited.calls)
        hidden = f", {number} AS relay_where, [{listed}]::BIGINT[] AS relay_list "
        end = edited.structure.span(select.clauses["select"])[1]
        added = [edited.splices.add(end, end, _HIDDEN_RANK, lambda splice: hidden)]
        parts = [part for part in ("limit", "offset") if part in select.clauses]
        if parts:
            first = min(select.keywords[part] for part in parts)
            last = max(select.clauses[part][1] for part in parts)
            begin, end = edited.structure.span((first, last))
            added.append(edited.splices.add(begin, end, 0, lambda splice: f"LIMIT {num_rows}"))
        if where is not None:
            edited.passing.add(where)
        try:
            return edited.context(select.query, edited.text(select.query.range))
        finally:
            for splice in added:
                edited.splices.remove(splice)
            if where is not None:
                edited.passing.discard(where)

    def _missing_of_list(self, call: Call) -> str:
        edited = self._edited
        inner = [
            other for other in self._limited.calls if call.range[0] < other.range[0] < call.range[1]
        ]
        text = edited.missing(call)
        for other in inner:
            text = f"CASE WHEN {edited.missing(other)} IS NULL THEN {text} END"
        return text


def stands_alone(edited: Edited, select: Select) -> bool:
    """Whether its query uses nothing of the queries around it."""
    if select.query.above is None and select.query.owner is None:
        return True
    text = edited.context(select.query, edited.text(select.query.range))
    return is_valid(edited.connection, text)
