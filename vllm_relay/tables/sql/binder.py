# SPDX-License-Identifier: Apache-2.0
"""What DuckDB says of a query without running it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property

import duckdb
from sqlglot import exp

from vllm_relay.tables.sql.expressions import sql_of

_NAME = re.compile(r"\s*\"?(\w+)\"?\(")


class Binder:
    """Names and functions as one DuckDB connection understands them."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._connection = connection

    def columns(self, query: exp.Query, ctes: Sequence[exp.CTE]) -> list[tuple[str, str]]:
        """Name and type of each column of a query.

        Raises:
            duckdb.Error: the query is not valid.
        """
        rows = self._connection.execute(f"DESCRIBE {query_text(query, ctes)}").fetchall()
        return [(row[0], row[1]) for row in rows]

    def is_valid(self, query: exp.Query, ctes: Sequence[exp.CTE]) -> bool:
        try:
            self.columns(query, ctes)
        except duckdb.Error:
            return False
        return True

    @cached_property
    def _aggregates(self) -> frozenset[str]:
        return self._functions("function_type = 'aggregate'")

    @cached_property
    def _volatile(self) -> frozenset[str]:
        return self._functions("stability = 'VOLATILE'")

    def _functions(self, condition: str) -> frozenset[str]:
        query = f"SELECT DISTINCT lower(function_name) FROM duckdb_functions() WHERE {condition}"
        return frozenset(row[0] for row in self._connection.execute(query).fetchall())

    def is_aggregate(self, node: exp.Expr) -> bool:
        """Whether a node computes one value of several rows; a window is one too."""
        return isinstance(node, (exp.AggFunc, exp.Window)) or (
            isinstance(node, exp.Func) and _function_name(node) in self._aggregates
        )

    def is_volatile(self, node: exp.Expr) -> bool:
        """Whether a node is a function that gives something else each time."""
        return isinstance(node, exp.Func) and _function_name(node) in self._volatile

    def has_volatile(self, node: exp.Expr) -> bool:
        return any(self.is_volatile(part) for part in node.find_all(exp.Func))


def _function_name(node: exp.Func) -> str:
    match = _NAME.match(sql_of(node))
    return match[1].lower() if match else ""


def query_text(query: exp.Query, ctes: Sequence[exp.CTE]) -> str:
    """The text of a query that may use common table expressions."""
    if not ctes:
        return sql_of(query)
    query = query.copy()
    own = query.args.get("with_")
    known = [cte.copy() for cte in ctes]
    query.set("with_", exp.With(expressions=known + (own.expressions if own else [])))
    return sql_of(query)
