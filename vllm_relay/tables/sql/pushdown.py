# SPDX-License-Identifier: Apache-2.0
"""What a query does not need of the SELECTs with calls in its FROM is not asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlglot import exp

from vllm_relay.tables.sql.binder import Binder
from vllm_relay.tables.sql.calls import is_star
from vllm_relay.tables.sql.expressions import (
    all_of,
    conjuncts,
    fold,
    has_call,
    is_query,
    outermost_queries,
    replace_in,
    walk_scope,
)
from vllm_relay.tables.sql.groups import Groups
from vllm_relay.tables.sql.probe import probe
from vllm_relay.tables.sql.rows import keeps_rows, unnests
from vllm_relay.tables.sql.stage import StageColumns

_NOT_THROUGH = ("limit", "offset", "qualify", "windows", "sample", "pivots")
# types of which equal values are the same; unlike -0.0 and 0.0, or 30 days and a month
_EXACT = (
    *("BOOLEAN", "TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT"),
    *("UTINYINT", "USMALLINT", "UINTEGER", "UBIGINT", "UHUGEINT"),
    *("DATE", "TIME", "TIMESTAMP", "UUID", "BLOB", "VARCHAR"),
)
_EXACT_BEGINNINGS = ("DECIMAL(", "ENUM(", "TIMESTAMP_")


@dataclass
class _Source:
    """A subquery in FROM.

    Attributes:
        alias: of it; "" if it has none.
        branches: the SELECTs whose rows are its rows, one but for UNION ALL.
        columns: name and type of each.
    """

    alias: str
    branches: list[exp.Select]
    columns: list[tuple[str, str]]

    def position(self, name: str) -> int | None:
        """Of the only column of this name."""
        names = [fold(column) for column, _ in self.columns]
        return names.index(fold(name)) if names.count(fold(name)) == 1 else None


def push_down(select: exp.Select, binder: Binder, ctes: Sequence[exp.CTE]) -> None:
    """Move conditions of WHERE into the subqueries that they are about, and make calls of
    subqueries whose column nobody reads NULL.

    Args:
        select: is changed.
        binder: of the connection.
        ctes: that the SELECT may use.
    """
    joins = select.args.get("joins") or []
    from_ = select.args.get("from_")
    if from_ is None:
        return
    for index, node in enumerate([from_.this, *(join.this for join in joins)]):
        if not isinstance(node, exp.Subquery) or not has_call(node):
            continue
        source = _source(node, binder, ctes)
        if source is None:
            continue
        if _filters_commute(select, joins, index):
            _push_conditions(select, source, binder, ctes)
        _drop_columns(select, source, joins)


def _source(node: exp.Subquery, binder: Binder, ctes: Sequence[exp.CTE]) -> _Source | None:
    alias = node.args.get("alias")
    if any(node.args.get(part) for part in ("sample", "pivots", "limit", "offset", "order")):
        return None
    if alias is not None and alias.columns:
        return None
    if node.args.get("joins") or node.args.get("laterals"):
        return None
    branches = _branches(node.this)
    if branches is None:
        return None
    columns = [binder.columns(probe(branch), ctes) for branch in branches]
    types = [[kind for _, kind in branch] for branch in columns]
    if any(other != types[0] for other in types):
        # a condition would be about values of another type
        return None
    return _Source(node.alias, branches, columns[0])


def _branches(query: exp.Expr) -> list[exp.Select] | None:
    """The SELECTs of a UNION ALL, or one; None if a condition cannot go into them."""
    if isinstance(query, exp.Subquery):
        # anything else in the parentheses is about more than the query in them
        is_bare = not any(value for part, value in query.args.items() if part != "this")
        return _branches(query.this) if is_bare else None
    if query.args.get("with_") is not None:
        return None
    if isinstance(query, exp.Union):
        parts = ("limit", "offset", "by_name", "order")
        if query.args.get("distinct") or any(query.args.get(part) for part in parts):
            return None
        left, right = _branches(query.this), _branches(query.expression)
        return None if left is None or right is None else left + right
    return [query] if isinstance(query, exp.Select) else None


def _filters_commute(select: exp.Select, joins: list[exp.Join], index: int) -> bool:
    """Whether rows of a source can be left out before the joins.

    Args:
        index: of the source, 0 for the first one of FROM.
    """
    if select.args.get("sample") or select.args.get("laterals"):
        return False
    later = joins[index:]
    if not all(join.side in ("", "LEFT") and (join.method or "") != "POSITIONAL" for join in later):
        return False
    if index == 0:
        return True
    own = joins[index - 1]
    return not own.side and not own.method and own.kind in ("", "INNER", "CROSS")


def _push_conditions(
    select: exp.Select, source: _Source, binder: Binder, ctes: Sequence[exp.CTE]
) -> None:
    where = select.args.get("where")
    if where is None or not all(_lets_through(branch) for branch in source.branches):
        return
    outer = StageColumns(probe(select), binder, ctes)
    kept: list[exp.Expr] = []
    for condition in conjuncts(where.this):
        moved = _moved(condition, select, source, outer, binder, ctes)
        if moved is None:
            kept.append(condition)
            continue
        for branch, inner in zip(source.branches, moved, strict=True):
            branch.where(exp.paren(inner), copy=False)
    left = all_of(kept)
    select.set("where", None if left is None else exp.Where(this=left))


def _lets_through(select: exp.Select) -> bool:
    """Whether conditions on values of the result may be ones on what the SELECT reads."""
    if any(select.args.get(part) for part in _NOT_THROUGH) or unnests(select):
        return False
    return not any(part.find(exp.Window) is not None for part in select.expressions)


def _commute(
    columns: set[str],
    values: Sequence[exp.Expr],
    branch: exp.Select,
    source: _Source,
    binder: Binder,
    ctes: Sequence[exp.CTE],
) -> bool:
    """Whether leaving out rows of the result is leaving out rows that the SELECT reads.

    Args:
        columns: that the condition is about.
        values: their expressions in the branch.
    """
    if keeps_rows(branch, binder):
        return True
    distinct = branch.args.get("distinct")
    if distinct is not None and distinct.args.get("on") is not None:
        return False
    kinds = [kind for name, kind in source.columns if fold(name) in columns]
    if not all(kind in _EXACT or kind.startswith(_EXACT_BEGINNINGS) for kind in kinds):
        return False
    if "VARCHAR" in kinds and (binder.has_collations or branch.find(exp.Collate) is not None):
        return False
    if any(is_star(item) for item in branch.expressions):
        return False
    plain = probe(branch)
    groups = Groups(branch, binder, StageColumns(plain, binder, ctes))
    if not groups.is_grouped:
        return True
    # GROUP BY ALL of constants gives a row for no rows
    has_rows = any(key.find(exp.Column) is not None for key in groups.keys.values())
    keys = groups.keys
    return not groups.has_sets and has_rows and all(groups.text(value) in keys for value in values)


def _moved(
    condition: exp.Expr,
    select: exp.Select,
    source: _Source,
    outer: StageColumns,
    binder: Binder,
    ctes: Sequence[exp.CTE],
) -> list[exp.Expr] | None:
    """The condition over what each branch reads; None if it is about more than the source."""
    if has_call(condition) or binder.has_volatile(condition):
        return None
    if not all(binder.is_valid(query, ctes) for query in outermost_queries(condition)):
        # it is about rows of the query around it
        return None
    if condition.find(exp.Lambda, exp.Columns, exp.PositionalColumn) is not None:
        return None
    columns = [part for part in walk_scope(condition) if isinstance(part, exp.Column)]
    if not columns:
        return None
    for column in columns:
        if not _is_of_source(column, select, source, outer):
            return None
    moved: list[exp.Expr] = []
    for branch in source.branches:
        values = {
            fold(column.name): _value(column.name, branch, source, binder, ctes)
            for column in columns
        }
        if any(value is None or binder.has_volatile(value) for value in values.values()):
            return None
        found = {name: value for name, value in values.items() if value is not None}
        if not _commute(set(found), list(found.values()), branch, source, binder, ctes):
            return None

        def change(
            part: exp.Expr, found: dict[str, exp.Expr] = found
        ) -> exp.Expr | None:  # of this branch
            if is_query(part):
                return part
            return (
                exp.paren(found[fold(part.name)].copy()) if isinstance(part, exp.Column) else None
            )

        moved.append(replace_in(condition, change))
    return moved


def _is_of_source(
    column: exp.Column, select: exp.Select, source: _Source, outer: StageColumns
) -> bool:
    if isinstance(column.this, exp.Star) or source.position(column.name) is None:
        return False
    if column.table:
        is_short = len(column.parts) == 2
        return is_short and bool(source.alias) and fold(column.table) == fold(source.alias)
    joins = select.args.get("joins") or []
    if any(join.args.get("using") or join.method == "NATURAL" for join in joins):
        return False
    return outer.is_plain(column)


def _value(
    name: str, branch: exp.Select, source: _Source, binder: Binder, ctes: Sequence[exp.CTE]
) -> exp.Expr | None:
    """The expression of a column of the source in a branch; None if it cannot be said."""
    position = source.position(name)
    if not any(is_star(item) or isinstance(item, exp.Columns) for item in branch.expressions):
        return None if position is None else branch.expressions[position].unalias()
    if len(source.branches) > 1:
        return None
    for item in branch.expressions:
        if not is_star(item) and fold(item.alias_or_name) == fold(name):
            return item.unalias()
    stars = [item for item in branch.expressions if is_star(item)]
    if len(stars) > 1 or isinstance(stars[0], exp.Column) or branch.find(exp.Columns):
        return None
    if stars[0].args.get("replace") or stars[0].args.get("rename"):
        return None
    column = exp.column(exp.to_identifier(name, quoted=True))
    plain = StageColumns(probe(branch), binder, ctes).is_plain(column)
    return column if plain else None


def _drop_columns(select: exp.Select, source: _Source, joins: list[exp.Join]) -> None:
    if any(join.args.get("using") or join.method == "NATURAL" for join in joins):
        return
    inside = {id(part) for branch in source.branches for part in branch.walk()}
    outside = [part for part in select.walk() if id(part) not in inside]
    by_others = (exp.Columns, exp.PositionalColumn)
    if any(isinstance(part, by_others) or _stands_for_columns(part) for part in outside):
        return
    used: set[str] = set()
    for part in outside:
        if isinstance(part, exp.Column):
            # with a table, the first part may be a column that has fields
            used |= {fold(name.name) for name in part.parts}
            if not part.table and fold(part.name) == fold(source.alias):
                return
    for position, (name, _) in enumerate(source.columns):
        if fold(name) in used:
            continue
        for branch in source.branches:
            if not any(is_star(item) for item in branch.expressions):
                _drop(branch, position)
            else:
                for index, item in enumerate(branch.expressions):
                    if fold(item.alias_or_name) == fold(name):
                        _drop(branch, index)


def _stands_for_columns(part: exp.Expr) -> bool:
    """Whether it is a star, but not that of count(*)."""
    return is_star(part) and not isinstance(part.parent, (exp.Count, exp.Column))


def _drop(branch: exp.Select, position: int) -> None:
    """Make an item NULL, if it asks and the SELECT itself does not use it."""
    item = branch.expressions[position]
    parts = ("distinct", "group", "having", "qualify", "order", "windows")
    if not has_call(item) or any(branch.args.get(part) for part in parts):
        return
    own = {id(part) for part in item.walk()}
    names = {fold(part.name) for part in branch.find_all(exp.Column) if id(part) not in own}
    if fold(item.alias_or_name) not in names:
        branch.expressions[position].replace(
            exp.alias_(exp.null(), item.alias_or_name, quoted=True)
        )
