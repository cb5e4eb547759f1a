# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a statement that calls llm(), and where."""

from __future__ import annotations

from sqlglot import exp


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
