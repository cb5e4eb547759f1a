# SPDX-License-Identifier: Apache-2.0
"""Small questions about SQL expressions, and what is wrong with them."""

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


class SqlError(ValueError):
    """A statement with calls of llm() that cannot be answered as it is."""


class AnswerFailedError(RuntimeError):
    """Rows have no answer, and the connection was told to raise then."""


def error_at(node: exp.Expr, message: str) -> SqlError:
    """An error that names the line and the column of a node, if they are known."""
    for part in node.find_all(exp.Anonymous, exp.Identifier, bfs=True):
        if "line" in part.meta:
            # sqlglot counts columns up to the end of the word
            column = part.meta["col"] - (part.meta["end"] - part.meta["start"])
            return SqlError(f"line {part.meta['line']}, column {column}: {message}")
    return SqlError(message)


def text_of(node: exp.Expr) -> str | None:
    """The text of ``'...'``, ``$$...$$`` or ``E'...'``; None if the node is none of them."""
    is_text = isinstance(node, (exp.RawString, exp.ByteString)) or (
        isinstance(node, exp.Literal) and node.is_string
    )
    return node.name if is_text else None
