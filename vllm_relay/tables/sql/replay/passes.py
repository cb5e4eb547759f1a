# SPDX-License-Identifier: Apache-2.0
"""Runs of a statement until nothing is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import duckdb

from vllm_relay.tables.sql.replay.answers import Answers, Ask
from vllm_relay.tables.sql.replay.edited import Edited
from vllm_relay.tables.sql.temporary_tables import TemporaryTables


class Passes:
    """
    Args:
        connection: of DuckDB.
        tables: for temporary ones.
        edited: the statement.
        answers: of it.
        ask: what answers.
    """

    def __init__(
        self,
        connection: duckdb.DuckDBPyConnection,
        tables: TemporaryTables,
        edited: Edited,
        answers: Answers,
        ask: Ask,
    ) -> None:
        self._connection = connection
        self._tables = tables
        self.edited = edited
        self.answers = answers
        self._ask = ask

    def table_of(self, text: Callable[[], str]) -> str:
        """A temporary table with the rows of a query, with all answers that it needs."""
        while True:
            self.answers.begin_pass()
            table = self._tables.create(text())
            site = self.answers.first_missing()
            if site is None:
                return table
            self._tables.drop(table)
            self.answers.ask(site, dict(self.answers.missing[site]), self._ask)

    def run(self, text: Callable[[], str]) -> None:
        """Have the answers that a statement needs: it is run, and what it did is undone."""
        while True:
            self.answers.begin_pass()
            self._connection.execute("BEGIN")
            try:
                self._connection.execute(text()).fetchall()
            finally:
                self._connection.execute("ROLLBACK")
            site = self.answers.first_missing()
            if site is None:
                return
            self.answers.ask(site, dict(self.answers.missing[site]), self._ask)


@contextmanager
def one_view(connection: duckdb.DuckDBPyConnection) -> Iterator[bool]:
    """All statements see the same data; yields whether the transaction is one of the caller."""
    try:
        connection.execute("BEGIN")
    except duckdb.TransactionException:
        yield True
        return
    try:
        yield False
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")
