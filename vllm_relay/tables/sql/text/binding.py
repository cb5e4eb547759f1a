# SPDX-License-Identifier: Apache-2.0
"""What DuckDB says of a query without running it."""

from __future__ import annotations

import duckdb


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
