# SPDX-License-Identifier: Apache-2.0
"""How a SELECT groups its rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from sqlglot import exp

from vllm_relay.tables.sql.aliases import Aliases
from vllm_relay.tables.sql.binder import Binder
from vllm_relay.tables.sql.expressions import (
    AGGREGATE_CLAUSES,
    fold,
    is_query,
    replace_in,
    sql_of,
)
from vllm_relay.tables.sql.stage import StageColumns

_SETS = (exp.Rollup, exp.Cube, exp.GroupingSets)


class Groups:
    """
    Args:
        select: without calls in FROM.
        binder: of the connection.
        columns: of what the SELECT reads.
    """

    def __init__(self, select: exp.Select, binder: Binder, columns: StageColumns) -> None:
        self._select = select
        self._binder = binder
        self._columns = columns
        self._aliases = Aliases(select, columns.is_column)

    @property
    def is_grouped(self) -> bool:
        """Whether the rows of the result are groups, or one of all rows."""
        if self._select.args.get("group") or self._select.args.get("having"):
            return True
        roots = [*self._select.expressions, self._select.args.get("order")]
        return any(
            self.is_of_groups(part)
            for root in roots
            if root is not None
            for part in root.walk(prune=is_query)
        )

    def is_of_groups(self, node: exp.Expr) -> bool:
        """Whether it is an aggregate of the grouping, not the function of a window."""
        while isinstance(node, AGGREGATE_CLAUSES):
            if isinstance(node.parent, exp.Window) and node.parent.this is node:
                return False
            node = node.this
        if isinstance(node, exp.Window) or not self._binder.is_aggregate(node):
            return False
        above = node.parent
        while isinstance(above, AGGREGATE_CLAUSES):
            node, above = above, above.parent
        return not (isinstance(above, exp.Window) and above.this is node)

    @property
    def has_sets(self) -> bool:
        """Whether there are ROLLUP, CUBE or GROUPING SETS."""
        group = self._select.args.get("group")
        return group is not None and any(isinstance(node, _SETS) for node in group.expressions)

    @cached_property
    def keys(self) -> dict[str, exp.Expr]:
        """What is grouped by, by its text."""
        return {self.text(key): key for key in self._keys()}

    def _keys(self) -> list[exp.Expr]:
        group = self._select.args.get("group")
        if group is None:
            return []
        items = [item.unalias() for item in self._select.expressions]
        if group.args.get("all"):
            expanded = [self._aliases.expand(item) for item in items]
            return [
                item for item in expanded
                if not any(self.is_of_groups(part) for part in item.walk(prune=is_query))
            ]  # fmt: skip
        written = _flat(group.expressions)
        keys: list[exp.Expr] = []
        for key in written:
            if isinstance(key, exp.Literal) and not key.is_string:
                key = items[int(key.this) - 1]
            keys.append(self._aliases.expand(key))
        return keys

    def text(self, node: exp.Expr) -> str:
        """The same for the same expression, whether or not it names tables."""

        def change(part: exp.Expr) -> exp.Expr | None:
            if isinstance(part, exp.Paren):
                return replace_in(part.unnest(), change)
            if isinstance(part, exp.Column):
                if not isinstance(part.this, exp.Star) and self._columns.is_plain(part):
                    return exp.column(exp.to_identifier(fold(part.name), quoted=True))
                return part
            return None

        return sql_of(replace_in(node.unnest(), change))


def _flat(keys: Sequence[exp.Expr]) -> list[exp.Expr]:
    """Keys, those of ROLLUP, CUBE and GROUPING SETS too."""
    flat: list[exp.Expr] = []
    for key in keys:
        is_set = isinstance(key, (*_SETS, exp.Tuple))
        flat += _flat(key.expressions) if is_set else [key.unnest()]
    return flat
