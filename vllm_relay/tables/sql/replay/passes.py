# SPDX-License-Identifier: Apache-2.0
"""Runs of a statement until nothing is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import duckdb

from vllm_relay.tables.sql.expressions import SqlError
from vllm_relay.tables.sql.replay.limits import LimitedRows, limited, stands_alone
from vllm_relay.tables.sql.replay.replayed import Replayed
from vllm_relay.tables.sql.replay.samples import Cost, order_conditions
from vllm_relay.tables.sql.text.structure import Select


class Passes:
    """
    Args:
        cost: tokens per prompt of a source; None for an estimate, in which all rows pass.
    """

    def __init__(self, replayed: Replayed, cost: Cost | None) -> None:
        self._replayed = replayed
        self._connection = replayed.tables.connection
        self._tables, self._answers = replayed.tables, replayed.answers
        self._cost = cost
        self._prepared: list[Select] = []

    def table_of(self, text: Callable[[], str]) -> str:
        """A temporary table with the rows of a query, with all answers that it needs."""
        while True:
            self._answers.begin_pass()
            table = self._tables.create(text())
            if self._has_all():
                return table
            self._tables.drop(table)

    def _has_all(self) -> bool:
        """Whether the last pass missed nothing; asks what it missed first otherwise."""
        site = self._answers.first_missing()
        if site is not None and not self._prepare(site):
            self._answers.ask(site, dict(self._answers.missing[site]), self._replayed.ask)
        return site is None

    def _prepare(self, site: int) -> bool:
        """Have fewer rows to ask about; False if that was done or cannot be done."""
        edited = self._replayed.edited
        call = next(call for call in edited.calls if call.site.number == site)
        select = call.select
        if select is None or select in self._prepared or "from" not in select.clauses:
            return False
        if edited.lets_none_through:
            return False
        self._prepared.append(select)
        where = select.clauses.get("where")
        found = limited(edited, select)
        is_filter = call.clause == "where" and where in edited.conditions
        if not (found or is_filter) or not stands_alone(edited, select):
            return False
        if self._cost is None and (is_filter or (found is not None and found.where is not None)):
            return False
        num_sampled = 0
        if is_filter and self._cost is not None:
            num_sampled = order_conditions(self._replayed, self._cost, select)
        if found is None:
            return num_sampled > 0
        rows = LimitedRows(self._replayed, found, num_sampled).table()
        edited.replace_query(select.query, f"FROM {rows}")
        return True

    def run(self, text: Callable[[], str]) -> None:
        """Have the answers that a statement needs: it is run, and what it did is undone."""
        if in_transaction(self._connection):
            raise SqlError(
                "a statement that changes rows with llm() inside an open transaction: it is run "
                "to see what it asks, and undone, which needs a transaction of its own; commit "
                "first, or make a table of the answers and use that"
            )
        while True:
            self._answers.begin_pass()
            self._connection.execute("BEGIN")
            try:
                self._connection.execute(text()).fetchall()
            finally:
                self._connection.execute("ROLLBACK")
            if self._has_all():
                return


@contextmanager
def one_view(connection: duckdb.DuckDBPyConnection) -> Iterator[bool]:
    """All statements see the same data; yields whether the transaction is one of the caller."""
    if in_transaction(connection):
        yield True
        return
    connection.execute("BEGIN")
    try:
        yield False
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def in_transaction(connection: duckdb.DuckDBPyConnection) -> bool:
    """Whether one is open; without one each statement has its own."""
    numbers = [connection.execute("SELECT txid_current()").fetchall() for _ in range(2)]
    return bool(numbers[0] == numbers[1])
