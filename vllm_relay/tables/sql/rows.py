# SPDX-License-Identifier: Apache-2.0
"""What the rows of a SELECT are: rows that it reads, groups of them, or parts."""

from __future__ import annotations

from sqlglot import exp

from vllm_relay.tables.sql.binder import Binder
from vllm_relay.tables.sql.expressions import AGGREGATE_CLAUSES, fold, is_query, walk_scope


def keeps_rows(select: exp.Select, binder: Binder) -> bool:
    """Whether each row of the result is one row that the SELECT reads, so without grouping."""
    if any(select.args.get(part) for part in ("distinct", "group", "having")):
        return False
    roots = [*select.expressions, select.args.get("order"), select.args.get("qualify")]
    return not any(
        binder.is_aggregate(part) and not _is_of_window(part)
        for root in roots
        if root is not None
        for part in walk_scope(root)
    )


def unnests(select: exp.Select) -> bool:
    """Whether a row can become several, or none, in the select list."""
    return any(
        isinstance(part, (exp.Unnest, exp.Explode))
        or (isinstance(part, exp.Anonymous) and fold(part.name) == "unnest")
        for item in select.expressions
        for part in item.walk(prune=is_query)
    )


def _is_of_window(node: exp.Expr) -> bool:
    """Whether it is a window, or the function of one."""
    while isinstance(node.parent, AGGREGATE_CLAUSES):
        node = node.parent
    return isinstance(node, exp.Window) or (
        isinstance(node.parent, exp.Window) and node.parent.this is node
    )
