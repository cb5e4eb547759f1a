# SPDX-License-Identifier: Apache-2.0
"""Functions that compute one value of several rows."""

from __future__ import annotations

import duckdb

from vllm_relay.tables.sql.expressions import AGGREGATE


def aggregate_names(connection: duckdb.DuckDBPyConnection) -> frozenset[str]:
    """In small letters, llm_agg among them."""
    rows = connection.execute(
        "SELECT DISTINCT lower(function_name) FROM duckdb_functions() "
        "WHERE function_type = 'aggregate'"
    ).fetchall()
    return frozenset([AGGREGATE, *(name for (name,) in rows)])
