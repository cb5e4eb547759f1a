# SPDX-License-Identifier: Apache-2.0
"""QUALIFY before calls are asked, and after."""

from __future__ import annotations

from sqlglot import exp

from vllm_relay.tables.sql.aliases import Aliases
from vllm_relay.tables.sql.expressions import calls_inside_first, has_call, walk_scope
from vllm_relay.tables.sql.rows import unnests


def has_window(node: exp.Expr) -> bool:
    """Whether it, subqueries apart, looks at other rows."""
    return any(isinstance(part, exp.Window) for part in walk_scope(node))


def early_qualify(select: exp.Select, aliases: Aliases) -> exp.Expr | None:
    """The condition of QUALIFY, if it can leave out rows before any call is asked.

    The windows of its list are computed with it then: they are over all rows.

    Args:
        select: without grouping, and without calls in WHERE.
        aliases: of its list.

    Returns:
        None if there is none, or calls decide about it or about a window.
    """
    qualify = select.args.get("qualify")
    if qualify is None or select.args.get("windows") or unnests(select):
        return None
    condition = aliases.expand(qualify.this)
    if has_call(condition):
        return None
    items = [exp.Paren(this=aliases.expand(item.unalias())) for item in select.expressions]
    if any(_asks_with_windows(item) for item in items):
        return None
    order = select.args.get("order")
    keys = [item.this for item in order.expressions] if order is not None else []
    for key in keys:
        expanded = aliases.expand(key, alias_first=True)
        # a name of the list is one of the result, too
        if has_window(key) or (has_call(expanded) and has_window(expanded)):
            return None
    return condition


def _asks_with_windows(item: exp.Expr) -> bool:
    """Whether a window is in a field of a call, or a call in a window."""
    windows = [part for part in walk_scope(item) if isinstance(part, exp.Window)]
    return any(map(has_call, windows)) or any(map(has_window, calls_inside_first(item)))


def qualify_by_where(final: exp.Select, keeps_rows: bool) -> None:
    """DuckDB takes no QUALIFY without a window, and that may have become a field of a call.

    Args:
        final: is changed.
        keeps_rows: whether it is without grouping.
    """
    qualify = final.args.get("qualify")
    if qualify is None or any(map(has_window, [qualify, *final.expressions])):
        return
    final.set("qualify", None)
    (final.where if keeps_rows else final.having)(qualify.this, copy=False)
