# SPDX-License-Identifier: Apache-2.0
"""A SELECT that groups and then asks, as a SELECT that asks over one that groups."""

from __future__ import annotations

from collections.abc import Sequence

from sqlglot import exp

from vllm_relay.tables.sql.aliases import Aliases
from vllm_relay.tables.sql.binder import Binder
from vllm_relay.tables.sql.errors import error_at
from vllm_relay.tables.sql.expressions import (
    RESERVED,
    ancestors,
    calls_inside_first,
    is_query,
    replace_in,
    sql_of,
)
from vllm_relay.tables.sql.groups import Groups
from vllm_relay.tables.sql.stage import StageColumns

_GROUPS = RESERVED + "groups"
_OUTER_PARTS = ("distinct", "qualify", "windows", "order", "limit", "offset")


def ask_after_grouping(
    select: exp.Select, binder: Binder, ctes: Sequence[exp.CTE], names: Sequence[str]
) -> exp.Select | None:
    """The SELECT over one that computes the groups' keys and aggregates.

    Args:
        select: without calls in FROM and in subqueries.
        names: of the columns of its result.

    Returns:
        None if no call is asked about groups: calls inside aggregates, in WHERE and in keys are
        asked about rows.

    Raises:
        SqlError: a call is asked about groups, and they cannot be taken apart.
    """
    columns = StageColumns(select, binder, ctes)
    return _Grouping(select, binder, columns, names).split()


class _Grouping:
    def __init__(
        self, select: exp.Select, binder: Binder, columns: StageColumns, names: Sequence[str]
    ) -> None:
        self._select = select
        self._columns = columns
        self._names = names
        self._aliases = Aliases(select, columns.is_column)
        self._groups = Groups(select, binder, columns)
        self._inner: dict[str, tuple[str, exp.Expr]] = {}

    def split(self) -> exp.Select | None:
        if not self._groups.is_grouped:
            return None
        keys = self._groups.keys
        roots = [*self._select.expressions]
        roots += [self._select.args[part] for part in ("having", "qualify", "order")
                  if self._select.args.get(part)]  # fmt: skip
        if not any(self._asks_about_groups(root, keys) for root in roots):
            return None
        if self._groups.has_sets:
            raise error_at(
                self._select.args["group"],
                "llm() asked about groups of ROLLUP, CUBE or GROUPING SETS: group in a "
                "subquery, and ask about its rows",
            )
        for text, key in keys.items():
            self._inner[text] = (f"{RESERVED}k{len(self._inner)}", key)
        outer = self._outer(keys)
        inner = exp.Select(
            expressions=[
                exp.alias_(value.copy(), name, quoted=True) for name, value in self._inner.values()
            ]
            or [exp.alias_(exp.null(), f"{RESERVED}k", quoted=True)]
        )
        for part in ("from_", "joins", "laterals", "where", "sample"):
            node = self._select.args.get(part)
            if node:
                inner.set(part, [n.copy() for n in node] if isinstance(node, list) else node.copy())
        if keys:
            inner.set("group", exp.Group(expressions=[key.copy() for key in keys.values()]))
        elif self._select.args.get("having") and len(self._inner) == 0:
            inner.set("having", exp.Having(this=exp.true()))
        outer.set("from_", exp.From(this=inner.subquery(_GROUPS)))
        return outer

    def _asks_about_groups(self, root: exp.Expr, keys: dict[str, exp.Expr]) -> bool:
        expanded = exp.Paren(this=self._aliases.expand(root))
        for call in calls_inside_first(expanded):
            parents = [call, *ancestors(call)]
            if not any(self._groups.is_of_groups(parent) or self._groups.text(parent) in keys
                       for parent in parents):  # fmt: skip
                return True
        return False

    def _outer(self, keys: dict[str, exp.Expr]) -> exp.Select:
        items: list[exp.Expr] = []
        for item, name in zip(self._select.expressions, self._names, strict=False):
            if self._columns.is_star_item(item):
                raise error_at(
                    item, f"{sql_of(item)} beside llm() asked about groups: name the columns"
                )
            expanded = self._aliases.expand(item.unalias())
            changed = self._over_groups(expanded)
            items.append(exp.alias_(changed, item.alias or name, quoted=True))
        outer = exp.Select(expressions=items)
        having = self._select.args.get("having")
        if having is not None:
            condition = self._over_groups(self._aliases.expand(having.this))
            outer.set("where", exp.Where(this=condition))
        for part in _OUTER_PARTS:
            node = self._select.args.get(part)
            if part == "order" and node is not None:
                outer.set(part, self._order(node))
            elif isinstance(node, list):
                outer.set(part, [self._over_groups(self._aliases.expand(n)) for n in node])
            elif node is not None:
                outer.set(part, self._over_groups(self._aliases.expand(node)))
        return outer

    def _order(self, order: exp.Order) -> exp.Order:
        changed = order.copy()
        for item in changed.expressions:
            key = item.this
            is_alias = isinstance(key, exp.Column) and not key.table and key.name in self._aliases
            if not (is_alias or sql_of(key).upper() == "ALL"):
                item.set("this", self._over_groups(self._aliases.expand(key)))
        return changed

    def _over_groups(self, node: exp.Expr) -> exp.Expr:
        """A copy that reads keys and aggregates by the names of their columns."""
        known = {name for name, _ in self._inner.values()}

        def change(part: exp.Expr) -> exp.Expr | None:
            if is_query(part):
                return part
            is_of_groups = self._groups.is_of_groups(part)
            text = (
                self._groups.text(part) if is_of_groups or isinstance(part, exp.Condition) else ""
            )
            if is_of_groups and text not in self._inner:
                name = f"{RESERVED}g{len(self._inner)}"
                self._inner[text] = (name, part.copy())
            if text in self._inner:
                name = self._inner[text][0]
                known.add(name)
                column = exp.column(exp.to_identifier(name, quoted=True))
                if isinstance(part.parent, exp.Struct) and isinstance(part, exp.Column):
                    return exp.PropertyEQ(
                        this=exp.to_identifier(part.name, True), expression=column
                    )
                return column
            if isinstance(part, exp.Column):
                raise error_at(
                    part,
                    f"{sql_of(part)} is used after grouping and is no key as it is written: put "
                    f"it in GROUP BY, or group in a subquery and ask about its rows",
                )
            return None

        holder = exp.Paren(this=node.copy())
        changed = replace_in(holder, change)
        return changed.this if isinstance(changed, exp.Paren) else changed
