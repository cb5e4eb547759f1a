# SPDX-License-Identifier: Apache-2.0
"""The rows on which the value of a part of an expression can matter."""

from __future__ import annotations

from collections.abc import Callable

from sqlglot import exp

from vllm_relay.tables.sql.expressions import all_of, stage_names


def guard_terms(
    node: exp.Expr, root: exp.Expr, is_aggregate: Callable[[exp.Expr], bool]
) -> list[exp.Expr]:
    """Conditions without which the value of the root does not depend on the node.

    Each may be left out, as one that cannot be evaluated yet: more rows pass then. Conditions
    above an aggregate or a window are about other rows and are not among them.

    Args:
        node: a part of the root.
        root: an expression.
        is_aggregate: whether a node computes one value of several rows.
    """
    terms: list[exp.Expr] = []
    child, parent = node, node.parent
    while child is not root and parent is not None:
        if is_aggregate(child):
            # above it, only a FILTER is about the same rows
            is_filtered = isinstance(parent, exp.Filter) and child is parent.this
            return terms + (_terms_of(child, parent) if is_filtered else [])
        terms += _terms_of(child, parent)
        child, parent = parent, parent.parent
    return terms


def _terms_of(child: exp.Expr, parent: exp.Expr) -> list[exp.Expr]:
    if isinstance(parent, (exp.And, exp.Or)):
        other = parent.right if child is parent.left else parent.left
        return [_differs(other, isinstance(parent, exp.Or))]
    if isinstance(parent, exp.Coalesce):
        arguments = [parent.this, *parent.expressions]
        before = arguments[: _position(child, arguments)]
        return [exp.Is(this=exp.paren(other.copy()), expression=exp.Null()) for other in before]
    if isinstance(parent, exp.If):
        if child is parent.this:
            return []
        if _is_branch(parent):
            # what comes before it is for the CASE to say
            assert isinstance(parent.parent, exp.Case)
            return [_is_true(_when(parent.parent, parent))]
        return [_is_true(parent.this) if child is parent.args.get("true") else _not(parent.this)]
    if isinstance(parent, exp.Case):
        branches = parent.args.get("ifs") or []
        if child is parent.this:
            return []
        before = (
            branches
            if child is parent.args.get("default")
            else branches[: _position(child, branches)]
        )
        return [_not(_when(parent, branch)) for branch in before]
    if isinstance(parent, exp.Filter) and child is parent.this:
        return [_is_true(parent.expression.this)]
    return []


def _is_branch(node: exp.If) -> bool:
    """Whether it is a WHEN, not the function if()."""
    case = node.parent
    return isinstance(case, exp.Case) and any(node is other for other in case.args["ifs"])


def _position(child: exp.Expr, arguments: list[exp.Expr]) -> int:
    return next(index for index, other in enumerate(arguments) if other is child)


def _when(case: exp.Case, branch: exp.If) -> exp.Expr:
    """The condition of a branch, of a CASE with an operand too."""
    if case.this is None:
        return branch.this
    return exp.EQ(this=exp.paren(case.this.copy()), expression=exp.paren(branch.this.copy()))


def _is_true(condition: exp.Expr) -> exp.Expr:
    return exp.NullSafeEQ(this=_boolean(condition), expression=exp.true())


def _not(condition: exp.Expr) -> exp.Expr:
    return _differs(condition, True)


def _differs(condition: exp.Expr, value: bool) -> exp.Expr:
    return exp.NullSafeNEQ(
        this=_boolean(condition), expression=exp.true() if value else exp.false()
    )


def _boolean(condition: exp.Expr) -> exp.Expr:
    return exp.cast(exp.paren(condition.copy()), "boolean")


def guard_condition(occurrences: list[list[exp.Expr]], unknown: set[str]) -> exp.Expr | None:
    """Where the value of a call can matter, as far as it can be said.

    Args:
        occurrences: the terms of each place of the call.
        unknown: columns of answers that are not there yet; terms that read them are left out.

    Returns:
        None if it can matter for every row.
    """
    joined: exp.Expr | None = None
    for terms in occurrences:
        condition = all_of(term for term in terms if not stage_names(term) & unknown)
        if condition is None:
            return None
        condition = exp.paren(condition)
        joined = condition if joined is None else exp.Or(this=joined, expression=condition)
    return joined
