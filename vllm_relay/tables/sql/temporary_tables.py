# SPDX-License-Identifier: Apache-2.0
"""The steps of a statement, each a table of DuckDB."""

from __future__ import annotations

import itertools
from typing import Any

import duckdb

from vllm_relay.tables.sql.expressions import RESERVED

# of this process: several objects may share a connection of DuckDB
_statement_numbers = itertools.count(1)


class TemporaryTables:
    """Temporary tables of one statement."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self.connection = connection
        self._prefix = f"{RESERVED}{next(_statement_numbers)}_"
        self._names: list[str] = []
        self._made = 0

    def new_name(self) -> str:
        self._made += 1
        name = f"{self._prefix}{self._made}"
        self._names.append(name)
        return name

    def create(self, query: str) -> str:
        """The name of a table with the rows of a query."""
        name = self.new_name()
        self.connection.execute(f"CREATE TEMP TABLE {name} AS {query}")
        return name

    def drop(self, name: str) -> None:
        self.connection.execute(f"DROP TABLE IF EXISTS {name}")
        self._names.remove(name)

    def drop_all(self) -> None:
        for name in list(self._names):
            self.drop(name)

    def count(self, name: str) -> int:
        return int(self.value(f"SELECT count(*) FROM {name}"))

    def value(self, query: str) -> Any:
        return self.connection.execute(query).fetchall()[0][0]
