# SPDX-License-Identifier: Apache-2.0
"""What is asked of DuckDB beside a statement, and the steps of one, each a table."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import duckdb

from vllm_relay.tables.sql.expressions import AGGREGATE, RESERVED

_FUNCTIONS = """
SELECT DISTINCT lower(function_name), function_type,
    CASE WHEN internal THEN stability = 'VOLATILE' ELSE function_type = 'scalar' END,
    lower(macro_definition)
FROM duckdb_functions()
WHERE function_type = 'aggregate' OR (internal AND stability = 'VOLATILE')
    OR NOT (internal OR starts_with(function_name, 'relay_'))
"""

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


@dataclass(frozen=True)
class FunctionNames:
    """Of functions that a connection knows, in small letters.

    Attributes:
        aggregates: llm_agg among them.
        volatile: that may give something else each time: those that DuckDB says so of, those that
            it did not bring, of which it knows nothing, and macros that call one of them.
    """

    aggregates: frozenset[str]
    volatile: frozenset[str]

    @classmethod
    def of(cls, connection: duckdb.DuckDBPyConnection) -> FunctionNames:
        """One look: DuckDB makes a list of all its functions, of thousands, each time."""
        rows = connection.execute(_FUNCTIONS).fetchall()
        volatile = {name for name, _, is_volatile, _ in rows if is_volatile}
        return cls(
            frozenset([AGGREGATE, *(name for name, kind, _, _ in rows if kind == "aggregate")]),
            frozenset(volatile).union(
                name
                for name, kind, is_volatile, macro in rows
                if kind == "macro" and any(f"{each}(" in macro for each in volatile)
            ),
        )


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
