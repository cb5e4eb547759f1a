# SPDX-License-Identifier: Apache-2.0
"""The same query with llm() as an ordinary function of DuckDB, asked row by row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import duckdb
import sqlglot
from sqlglot import exp

from vllm_relay.tables.images import ImageStore
from vllm_relay.tables.question import Question
from vllm_relay.tables.sql.calls import Field, read_call
from vllm_relay.tables.sql.expressions import is_call
from vllm_relay.tables.sql.replay.functions import SQL_TYPES

Answer = Callable[[Question, dict[str, Any]], Any]


def plain_rows(
    connection: duckdb.DuckDBPyConnection, text: str, answer_of: Answer
) -> list[tuple[Any, ...]]:
    """Rows of a query whose calls have their fields in braces."""
    tree = sqlglot.parse_one(text, dialect="duckdb")
    names: dict[str, str] = {}
    for node in _calls_inside_first(tree):
        # one function per text, so that GROUP BY finds the expression of the select list
        written = node.sql("duckdb")
        call = read_call(node, _no_star, ImageStore())
        if written not in names:
            names[written] = f"llm_{len(names)}"
            connection.create_function(
                names[written],
                _function(call.question, answer_of),
                None,  # type: ignore[arg-type]  # any number of any type
                {**SQL_TYPES, "json": "JSON"}[call.question.output.type],
                null_handling="special",
            )
        values = [field.expression.copy() for field in call.fields]
        node.replace(exp.Anonymous(this=names[written], expressions=values))
    try:
        return connection.sql(tree.sql("duckdb")).fetchall()
    finally:
        for name in names.values():
            connection.remove_function(name)


def _calls_inside_first(tree: exp.Expr) -> list[exp.Anonymous]:
    found = [part for part in tree.find_all(exp.Anonymous) if is_call(part)]

    def depth(node: exp.Expr | None) -> int:
        return 0 if node is None else 1 + depth(node.parent)

    return sorted(found, key=depth, reverse=True)


def _function(question: Question, answer_of: Answer) -> Callable[..., Any]:
    def answer(*values: Any) -> Any:
        return answer_of(question, dict(zip(question.fields, values, strict=True)))

    return answer


def _no_star(star: exp.Expr) -> list[Field]:
    raise AssertionError(f"the oracle does not know the fields of {star}")
