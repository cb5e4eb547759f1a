# SPDX-License-Identifier: Apache-2.0
"""Names of a select list that other parts of the SELECT use."""

from __future__ import annotations

from collections.abc import Callable

from sqlglot import exp

from vllm_relay.tables.sql.errors import error_at
from vllm_relay.tables.sql.expressions import fold, is_query, replace_in


class Aliases:
    """
    Args:
        select: whose list gives names to expressions.
        is_column: whether a reference is one to a column of what the SELECT reads.
    """

    def __init__(self, select: exp.Select, is_column: Callable[[exp.Column], bool]) -> None:
        self._is_column = is_column
        self._expressions: dict[str, exp.Expr] = {}
        for item in select.expressions:
            if isinstance(item, exp.Alias):
                self._expressions.setdefault(fold(item.alias), item.this)

    def __contains__(self, name: str) -> bool:
        return fold(name) in self._expressions

    def expand(self, node: exp.Expr, alias_first: bool = False) -> exp.Expr:
        """A copy with what the names stand for.

        Args:
            alias_first: a node that is only a name stands for an alias even if a column has it,
                as in ORDER BY.

        Raises:
            SqlError: an alias stands for itself.
        """
        return self._expand(node, alias_first, ())

    def _expand(self, node: exp.Expr, alias_first: bool, above: tuple[str, ...]) -> exp.Expr:
        def change(part: exp.Expr) -> exp.Expr | None:
            if is_query(part):
                return part
            if not isinstance(part, exp.Column) or part.table or isinstance(part.this, exp.Star):
                return None
            name = fold(part.name)
            is_whole = alias_first and part.parent is None
            if name not in self._expressions or (not is_whole and self._is_column(part)):
                return part
            if name in above:
                raise error_at(part, f"{part.name!r} in the select list stands for itself")
            # inside the select list a column goes before an alias
            value = exp.paren(self._expand(self._expressions[name], False, (*above, name)))
            if isinstance(part.parent, exp.Struct):
                # the name is that of a field too
                return exp.PropertyEQ(this=part.this.copy(), expression=value)
            return value

        return replace_in(node, change)
