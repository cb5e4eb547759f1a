# SPDX-License-Identifier: Apache-2.0
"""What DuckDB says of a query without running it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property

import duckdb
from sqlglot import exp
from sqlglot.dialects.duckdb import DuckDB
from sqlglot.tokens import TokenType

from vllm_relay.tables.sql.expressions import fold, sql_of

_NAME = re.compile(r"\s*\"?(\w+)\"?\(")


class Binder:
    """Names and functions as one DuckDB connection understands them, for one statement."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._connection = connection

    def columns(self, query: exp.Query, ctes: Sequence[exp.CTE]) -> list[tuple[str, str]]:
        """Name and type of each column of a query.

        Raises:
            duckdb.Error: the query is not valid.
        """
        text = query_text(query, ctes)
        # unlike a statement that fails, a relation that does leaves the transaction as it is;
        # with nextval() it is run
        self._connection.sql(f"FROM ({text}) LIMIT 0")
        rows = self._connection.execute(f"DESCRIBE {text}").fetchall()
        return [(row[0], row[1]) for row in rows]

    def is_valid(self, query: exp.Query, ctes: Sequence[exp.CTE]) -> bool:
        try:
            self.columns(query, ctes)
        except duckdb.Error:
            return False
        return True

    @cached_property
    def _functions(self) -> tuple[frozenset[str], frozenset[str]]:
        """Names of aggregates, and of what gives something else each time."""
        # what is one query for the user is several for DuckDB, and users' functions may do anything
        rows = self._connection.execute(
            "SELECT lower(function_name), bool_or(function_type = 'aggregate'), "
            "bool_or(stability IN ('VOLATILE', 'CONSISTENT_WITHIN_QUERY') "
            "OR (NOT internal AND function_type IN ('macro', 'scalar'))) "
            "FROM duckdb_functions() GROUP BY ALL"
        ).fetchall()
        aggregates = frozenset(name for name, is_aggregate, _ in rows if is_aggregate)
        return aggregates, frozenset(name for name, _, is_volatile in rows if is_volatile)

    @property
    def aggregates(self) -> frozenset[str]:
        return self._functions[0]

    @cached_property
    def has_collations(self) -> bool:
        """Whether texts that differ may be equal in some column."""
        default, tables = self._connection.execute(
            "SELECT current_setting('default_collation'), (SELECT count(*) FROM ("
            "SELECT sql FROM duckdb_tables() UNION ALL "
            "SELECT sql FROM duckdb_views() WHERE NOT internal"
            ") WHERE sql ILIKE '%collate%')"
        ).fetchall()[0]
        return bool(default) or bool(tables)

    def is_aggregate(self, node: exp.Expr) -> bool:
        """Whether a node computes one value of several rows; a window is one too."""
        return isinstance(node, (exp.AggFunc, exp.Window)) or (
            isinstance(node, exp.Func)
            and not isinstance(node, exp.Connector)
            and _function_name(node) in self._functions[0]
        )

    def is_volatile(self, node: exp.Expr) -> bool:
        """Whether a node is a function that gives something else each time."""
        is_function = isinstance(node, exp.Func) and not isinstance(node, exp.Connector)
        return is_function and _function_name(node) in self._functions[1]

    def has_volatile(self, node: exp.Expr) -> bool:
        return any(self.is_volatile(part) for part in node.find_all(exp.Func))


def _function_name(node: exp.Expr) -> str:
    """The name of a function as DuckDB has it; "" if the node is written in another way."""
    text = sql_of(node)
    match = _NAME.match(text)
    if match is None:
        return fold(text) if text.isidentifier() else ""
    # the bracket after the name has to be the last one: sum(x) > 1 AND y is no sum
    depth = 0
    for token in DuckDB().tokenize(text):
        depth += (token.token_type == TokenType.L_PAREN) - (token.token_type == TokenType.R_PAREN)
        if depth == 0 and token.token_type == TokenType.R_PAREN:
            return fold(match[1]) if token.end == len(text) - 1 else ""
    return ""


def query_text(query: exp.Query, ctes: Sequence[exp.CTE]) -> str:
    """The text of a query that may use common table expressions."""
    if not ctes:
        return sql_of(query)
    query = query.copy()
    own = query.args.get("with_")
    known = [cte.copy() for cte in ctes]
    query.set(
        "with_",
        exp.With(
            expressions=known + (own.expressions if own else []),
            recursive=bool(own and own.recursive),
        ),
    )
    return sql_of(query)
