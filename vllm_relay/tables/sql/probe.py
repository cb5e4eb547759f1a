# SPDX-License-Identifier: Apache-2.0
"""A query without its calls, for DuckDB to say what it is."""

from __future__ import annotations

from typing import TypeVar

from sqlglot import exp

from vllm_relay.tables.sql.calls import is_star, null_answer
from vllm_relay.tables.sql.expressions import (
    FUNCTION,
    calls_inside_first,
    has_call,
    is_call,
    sql_of,
)

QueryType = TypeVar("QueryType", bound=exp.Query)


def probe(query: QueryType) -> QueryType:
    """The query with NULL for answers: it is valid, and has the same columns, if the query is.

    Raises:
        SqlError: a call is not called as it should be.
    """
    probed = query.copy()
    for call in calls_inside_first(probed):
        call.replace(null_answer(call))
    return probed


def name_calls(query: exp.Query) -> exp.Query:
    """A copy in which every item of a select list that asks has a name."""
    named = query.copy()
    for select in named.find_all(exp.Select):
        for item in list(select.expressions):
            if has_call(item) and not isinstance(item, exp.Alias) and not is_star(item):
                name = FUNCTION if is_call(item) else sql_of(item)
                item.replace(exp.alias_(item.copy(), name, quoted=True))
    return named
