# SPDX-License-Identifier: Apache-2.0
"""Columns of errors beside those of answers."""

from __future__ import annotations

from sqlglot import exp

from vllm_relay.tables.sql.expressions import stage_column
from vllm_relay.tables.sql.select_plan import SelectPlan


def with_error_columns(query: exp.Query, plan: SelectPlan) -> exp.Query:
    """The last form of a SELECT with a column of errors for each call alone in its list.

    Other queries, and SELECTs whose rows are not single rows, stay as they are.
    """
    is_of_plan = isinstance(query, exp.Select) and query.expressions == plan.final.expressions
    if not is_of_plan or not plan.keeps_rows:
        return query
    query = query.copy()
    for position, name in plan.bare_calls:
        alias = f"{query.expressions[position].alias}_error"
        query.append("expressions", exp.alias_(stage_column(f"{name}_error"), alias, quoted=True))
    return query
