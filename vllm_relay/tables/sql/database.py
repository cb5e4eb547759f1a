# SPDX-License-Identifier: Apache-2.0
"""What is asked of DuckDB beside a statement, and the steps of one, each a table."""

from __future__ import annotations

import itertools
from typing import Any

import duckdb

from vllm_relay.tables.sql.expressions import AGGREGATE, RESERVED

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

    def value(self, query: str) -> Any:
        return self.connection.execute(query).fetchall()[0][0]


def aggregate_names(connection: duckdb.DuckDBPyConnection) -> frozenset[str]:
    """In small letters, llm_agg among them."""
    rows = connection.execute(
        "SELECT DISTINCT lower(function_name) FROM duckdb_functions() "
        "WHERE function_type = 'aggregate'"
    ).fetchall()
    return frozenset([AGGREGATE, *(name for (name,) in rows)])


def columns(connection: duckdb.DuckDBPyConnection, query: str) -> list[str]:
    """Names of a query's columns; unlike a statement, one that fails ends no transaction.

    Raises:
        duckdb.Error: the query is not valid.
    """
    return list(connection.sql(query).columns)


def is_valid(connection: duckdb.DuckDBPyConnection, query: str) -> bool:
    try:
        columns(connection, query)
    except duckdb.Error:
        return False
    return True
