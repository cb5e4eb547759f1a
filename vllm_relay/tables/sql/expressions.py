# SPDX-License-Identifier: Apache-2.0
"""Small questions about SQL expressions."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Iterator

from sqlglot import exp

DIALECT = "duckdb"
FUNCTION = "llm"
# names that the rewritten statements use for themselves
RESERVED = "__llm_"
_LOWER = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)
# around an aggregate: sum(x) FILTER (...), first(x IGNORE NULLS)
AGGREGATE_CLAUSES = (exp.Filter, exp.WithinGroup, exp.IgnoreNulls, exp.RespectNulls)
STAGE = RESERVED + "stage"
ROW = RESERVED + "row"


def sql_of(node: exp.Expr) -> str:
    return node.sql(DIALECT, normalize_functions=False)


def fold(name: str) -> str:
    """What names have in common that DuckDB takes for the same: only ASCII letters lose case."""
    return name.translate(_LOWER)


def is_call(node: exp.Expr | None) -> bool:
    return isinstance(node, exp.Anonymous) and node.name.lower() == FUNCTION


def has_call(node: exp.Expr | None) -> bool:
    return node is not None and any(is_call(found) for found in node.find_all(exp.Anonymous))


def calls_inside_first(node: exp.Expr) -> list[exp.Anonymous]:
    """Calls of an expression, as written but a call after those in its fields."""
    found = [part for part in node.find_all(exp.Anonymous, bfs=False) if is_call(part)]
    inner = {id(call): [other for other in found if _contains(call, other)] for call in found}
    order: list[exp.Anonymous] = []

    def visit(call: exp.Anonymous) -> None:
        if not any(call is other for other in order):
            for other in inner[id(call)]:
                visit(other)
            order.append(call)

    for call in found:
        visit(call)
    return order


def _contains(outer: exp.Expr, inner: exp.Expr) -> bool:
    return any(parent is outer for parent in ancestors(inner))


def ancestors(node: exp.Expr) -> Iterator[exp.Expr]:
    """From the parent up."""
    parent = node.parent
    while parent is not None:
        yield parent
        parent = parent.parent


def walk_scope(root: exp.Expr) -> Iterator[exp.Expr]:
    """The nodes of an expression that are not in a subquery of it; the root first."""
    return root.walk(bfs=False, prune=lambda node: node is not root and is_query(node))


def is_query(node: exp.Expr) -> bool:
    return isinstance(node, (exp.Select, exp.SetOperation))


def outermost_queries(node: exp.Expr) -> list[exp.Query]:
    """Queries in a node that are in no other one of it."""
    walk = node.walk(bfs=False, prune=lambda part: part is not node and is_query(part))
    return [
        part
        for part in walk
        if part is not node and isinstance(part, (exp.Select, exp.SetOperation))
    ]


def conjuncts(condition: exp.Expr | None) -> list[exp.Expr]:
    """The parts of a condition that all have to be true."""
    if condition is None:
        return []
    if isinstance(condition, exp.Paren):
        return conjuncts(condition.this)
    if isinstance(condition, exp.And):
        return conjuncts(condition.left) + conjuncts(condition.right)
    return [condition]


def all_of(conditions: Iterable[exp.Expr]) -> exp.Expr | None:
    """The condition that all are true; None if there are none."""
    copies = [exp.paren(condition.copy()) for condition in conditions]
    if not copies:
        return None
    joined: exp.Expr = copies[0]
    for condition in copies[1:]:
        joined = exp.And(this=joined, expression=condition)
    return joined


def replace_in(root: exp.Expr, change: Callable[[exp.Expr], exp.Expr | None]) -> exp.Expr:
    """A copy in which nodes are replaced; what replaces a node is not looked into.

    Args:
        change: gives what replaces a node, None to keep it and look into it.
    """

    def visit(node: exp.Expr) -> exp.Expr:
        changed = change(node)
        if changed is not None:
            return changed
        for key, value in list(node.args.items()):
            if isinstance(value, exp.Expr):
                node.set(key, visit(value))
            elif isinstance(value, list):
                node.set(
                    key, [visit(item) if isinstance(item, exp.Expr) else item for item in value]
                )
        return node

    return visit(root.copy())


def stage_column(name: str) -> exp.Column:
    return exp.column(exp.to_identifier(name, quoted=True), table=STAGE)


def stage_names(node: exp.Expr) -> set[str]:
    """The stage's columns that an expression reads by their own names."""
    return {column.name for column in node.find_all(exp.Column) if column.table == STAGE}
