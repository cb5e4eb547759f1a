# SPDX-License-Identifier: Apache-2.0
"""Small questions about SQL expressions."""

from __future__ import annotations

import string

from sqlglot import exp

DIALECT = "duckdb"
FUNCTION = "llm"
AGGREGATE = "llm_agg"
FUNCTIONS = (FUNCTION, AGGREGATE)
# names that the rewritten statements use for themselves
RESERVED = "__llm_"
_LOWER = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)


def sql_of(node: exp.Expr) -> str:
    return node.sql(DIALECT, normalize_functions=False)


def fold(name: str) -> str:
    """What names have in common that DuckDB takes for the same: only ASCII letters lose case."""
    return name.translate(_LOWER)


def is_call(node: exp.Expr | None) -> bool:
    return isinstance(node, exp.Anonymous) and node.name.lower() in FUNCTIONS


def has_call(node: exp.Expr | None) -> bool:
    return node is not None and any(is_call(found) for found in node.find_all(exp.Anonymous))
