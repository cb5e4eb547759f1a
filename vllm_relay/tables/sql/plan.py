# SPDX-License-Identifier: Apache-2.0
"""One SELECT with calls of llm(): what DuckDB does before, between and after them."""

from __future__ import annotations

from collections.abc import Sequence

from sqlglot import exp

from vllm_relay.tables.sql.aliases import Aliases
from vllm_relay.tables.sql.binder import Binder
from vllm_relay.tables.sql.calls import read_call
from vllm_relay.tables.sql.errors import error_at
from vllm_relay.tables.sql.expressions import (
    RESERVED,
    ROW,
    STAGE,
    all_of,
    ancestors,
    calls_inside_first,
    conjuncts,
    fold,
    has_call,
    is_call,
    is_query,
    replace_in,
    sql_of,
    stage_column,
    walk_scope,
)
from vllm_relay.tables.sql.guards import guard_terms
from vllm_relay.tables.sql.qualify import early_qualify, has_window, qualify_by_where
from vllm_relay.tables.sql.rows import keeps_rows, unnests
from vllm_relay.tables.sql.select_plan import PlannedCall, Predicate, SelectPlan
from vllm_relay.tables.sql.stage import StageColumns

# parts of a SELECT that its last form keeps, beside the list
_LATE_PARTS = ("distinct", "group", "having", "qualify", "windows", "order", "limit", "offset")


def plan_select(
    select: exp.Select, binder: Binder, ctes: Sequence[exp.CTE], names: Sequence[str]
) -> SelectPlan:
    """
    Args:
        select: with calls, but none in its FROM nor in a subquery; without grouping after which
            a call is asked.
        binder: of the connection.
        ctes: that the SELECT may use, without calls.
        names: of the columns of its result.

    Raises:
        SqlError: a call is not called as it should be, or stands where it cannot be answered.
    """
    return _Planner(select.copy(), binder, ctes, names).plan()


class _Planner:
    def __init__(
        self,
        select: exp.Select,
        binder: Binder,
        ctes: Sequence[exp.CTE],
        names: Sequence[str],
    ) -> None:
        self._select = select
        self._binder = binder
        self._columns = StageColumns(select, binder, ctes)
        self._aliases = Aliases(select, self._columns.is_column)
        self._names = names
        self._calls: dict[str, PlannedCall] = {}
        self._by_text: dict[str, str] = {}
        self._keeps_rows = keeps_rows(select, binder)
        # a condition of QUALIFY that the stage has; windows are computed there then
        self._qualify: exp.Expr | None = None

    def plan(self) -> SelectPlan:
        free, predicates = self._where()
        self._pass_guards_on(list(self._calls))
        if self._keeps_rows and not predicates:
            self._qualify = early_qualify(self._select, self._aliases)
        early = list(self._calls)
        # one that was asked under a guard has no answer for the other rows that passed
        self._by_text = {
            text: name for text, name in self._by_text.items() if [] in self._calls[name].guards
        }
        items, bare_calls = self._items()
        final = exp.Select(expressions=items, from_=exp.From(this=exp.to_table(STAGE)))
        order = self._stage_order()
        for part in _LATE_PARTS:
            node = self._select.args.get(part)
            if (part == "order" and order is not None) or (part == "qualify" and self._qualify):
                continue
            if isinstance(node, list):
                final.set(part, [self._root(item) for item in node])
            elif node is not None:
                final.set(part, self._root(node))
        late = [name for name in self._calls if name not in early]
        self._pass_guards_on(late)
        qualify_by_where(final, self._keeps_rows)
        stage = self._columns.stage(free, self._qualify, order or [])
        cut = self._cut() if order is not None else None
        if cut is not None:
            final.set("limit", None)
            final.set("offset", None)
            if not predicates:
                stage = stage.order_by(quoted_row()).limit(cut[1]).offset(cut[0])
                cut = None
        if self._keeps_rows:
            _order_by_row(final)
        return SelectPlan(
            stage, self._calls, predicates, late, cut, final, bare_calls, self._keeps_rows
        )

    def _where(self) -> tuple[exp.Expr | None, list[Predicate]]:
        """What DuckDB filters, and what it filters once calls are answered."""
        where = self._select.args.get("where")
        parts = [self._aliases.expand(part) for part in conjuncts(where.this if where else None)]
        free = all_of(part for part in parts if not has_call(part))
        predicates = []
        for part in parts:
            if has_call(part):
                condition = self._root(part, is_of_rows=True)
                predicates.append(Predicate(condition, self._needed(condition)))
        return free, predicates

    def _needed(self, condition: exp.Expr) -> tuple[str, ...]:
        """Calls that a condition needs, those in the fields of others first."""
        found: dict[str, None] = {}

        def visit(node: exp.Expr) -> None:
            for column in self._call_columns(node):
                for value in self._calls[column.name].fields:
                    visit(value)
                found[column.name] = None

        visit(condition)
        return tuple(found)

    def _call_columns(self, node: exp.Expr) -> list[exp.Column]:
        """The places of calls in an expression over the stage."""
        columns = node.find_all(exp.Column, bfs=False)
        return [part for part in columns if part.table == STAGE and part.name in self._calls]

    def _items(self) -> tuple[list[exp.Expr], list[tuple[int, str]]]:
        items: list[exp.Expr] = []
        bare_calls: list[tuple[int, str]] = []
        for item in self._select.expressions:
            if self._columns.is_star_item(item):
                items += self._star_items(item, len(items), bare_calls)
                continue
            changed = self._root(item, is_of_rows=self._keeps_rows)
            if not isinstance(changed, exp.Alias) and sql_of(changed) != sql_of(item):
                # an item that unnests may give several columns, and shift the names
                name = sql_of(item) if unnests(self._select) else self._names[len(items)]
                changed = exp.alias_(changed, name, quoted=True)
            if is_call(item.unalias()):
                bare_calls.append((len(items), changed.unalias().name))
            items.append(changed)
        return items, bare_calls

    def _star_items(
        self, item: exp.Expr, position: int, bare_calls: list[tuple[int, str]]
    ) -> list[exp.Expr]:
        """What a star stands for; of ``* REPLACE (llm(...) AS a)`` columns that ask too."""
        star = item.this if isinstance(item, exp.Column) else item
        asked: dict[str, exp.Expr] = {}
        if isinstance(star, exp.Star) and has_call(star):
            item = item.copy()
            star = item.this if isinstance(item, exp.Column) else item
            given = star.args.get("replace") or []
            asked = {fold(each.alias): each.this for each in given if has_call(each)}
            star.set("replace", [each for each in given if not has_call(each)])
        if has_call(item):
            raise error_at(
                item, f"llm() inside {sql_of(item)}: give it a place of its own in the list"
            )
        items = self._columns.expand_star(item)
        for index, column in enumerate(items):
            value = asked.get(fold(column.alias))
            if value is not None:
                changed = self._root(value, is_of_rows=self._keeps_rows)
                if is_call(value):
                    bare_calls.append((position + index, changed.name))
                items[index] = exp.alias_(changed, column.alias, quoted=True)
        return items

    def _root(self, node: exp.Expr, is_of_rows: bool = False) -> exp.Expr:
        """An expression over the stage; its calls are planned.

        Args:
            is_of_rows: it is evaluated once per row of the stage.
        """
        if has_call(node) and isinstance(node, exp.Order):
            node = node.copy()
            for item in node.expressions:
                item.set("this", self._aliases.expand(item.this, alias_first=True))
        elif has_call(node):
            node = self._aliases.expand(node)
        if is_of_rows:
            node = self._hoist(node)
        self._check_subqueries(node)
        # a holder, so that a node that is a call itself can be replaced too
        holder = exp.Paren(this=node.copy())
        for call in calls_inside_first(holder):
            self._check_place(call)
            call.replace(stage_column(self._plan_call(call)))
        root = self._columns.over_stage(holder.this)
        for column in self._call_columns(root):
            self._calls[column.name].guards.append(self._guards(column, root))
        return root

    def _plan_call(self, node: exp.Anonymous) -> str:
        text = sql_of(node)
        if text not in self._by_text:
            call = read_call(node, self._columns.star_fields)
            name = f"{RESERVED}a{len(self._calls)}"
            fields = tuple(self._columns.over_stage(part.expression) for part in call.fields)
            self._calls[name] = PlannedCall(name, text, call.question, fields)
            self._by_text[text] = name
        return self._by_text[text]

    def _guards(self, column: exp.Column, root: exp.Expr) -> list[exp.Expr]:
        """Conditions of a call's rows that are the same here and in the final SELECT."""
        return [
            term
            for term in guard_terms(column, root, self._binder.is_aggregate)
            if not self._binder.has_volatile(term)
            and not any(self._binder.is_aggregate(part) for part in walk_scope(term))
        ]

    def _pass_guards_on(self, names: Sequence[str]) -> None:
        """A call in a field of another matters where the other does."""
        for name in reversed(names):
            outer = self._calls[name]
            for value in outer.fields:
                for column in self._call_columns(value):
                    terms = self._guards(column, value)
                    self._calls[column.name].guards += [[*above, *terms] for above in outer.guards]

    def _check_place(self, call: exp.Anonymous) -> None:
        for parent in ancestors(call):
            if isinstance(parent, exp.Lambda):
                raise error_at(
                    call,
                    "llm() inside a lambda: unnest the list in a subquery, one row per element, "
                    "and call llm() on its rows",
                )
            if isinstance(parent, (exp.Limit, exp.Offset)):
                raise error_at(call, "llm() in LIMIT or OFFSET, expected a number")

    def _check_subqueries(self, node: exp.Expr) -> None:
        """What is evaluated several times beside a call has to be the same each time."""
        for query in node.find_all(exp.Select):
            if has_call(node) and self._binder.has_volatile(query):
                raise error_at(
                    query,
                    f"a subquery that differs each time beside llm(): {sql_of(query)}; give it a "
                    f"column of its own in a subquery of FROM",
                )

    def _hoist(self, node: exp.Expr) -> exp.Expr:
        """A copy in which what differs each time is evaluated once, with the stage."""

        def change(part: exp.Expr) -> exp.Expr | None:
            if self._qualify is not None and isinstance(part, exp.Window):
                return self._columns.add(part)
            if is_query(part) or (self._binder.is_aggregate(part) and not has_call(part)):
                return part
            if (
                self._binder.is_volatile(part)
                and not has_call(part)
                and part.find(exp.Lambda) is None
            ):
                return self._columns.add(part)
            return None

        return replace_in(node, change)

    def _stage_order(self) -> list[exp.Expr] | None:
        """The order of the result as one of the stage; None if it is not known before the end."""
        if not self._keeps_rows:
            return None
        order = self._select.args.get("order")
        if order is None:
            return []
        if unnests(self._select):
            return None
        items: list[exp.Expr] = []
        for item in order.expressions:
            key = item.this
            if isinstance(key, exp.Literal) and not key.is_string:
                before = self._select.expressions[: int(key.this)]
                if any(self._columns.is_star_item(part) for part in before):
                    return None
                expanded = self._aliases.expand(before[-1].unalias())
            else:
                expanded = self._aliases.expand(key, alias_first=True)
            if (
                has_call(expanded)
                or sql_of(key).upper() == "ALL"
                or any(self._binder.is_aggregate(part) for part in expanded.walk())
                or self._binder.has_volatile(expanded)
            ):
                return None
            changed = item.copy()
            changed.set("this", expanded)
            items.append(changed)
        return items

    def _cut(self) -> tuple[int, int] | None:
        """Offset and limit, where they are numbers and count rows of the stage."""
        limit, offset = self._select.args.get("limit"), self._select.args.get("offset")
        late_qualify = self._select.args.get("qualify") is not None and self._qualify is None
        if limit is None or late_qualify or any(map(has_window, self._select.expressions)):
            return None
        if unnests(self._select) or limit.args.get("limit_options"):
            return None
        numbers = [
            node.expression.this if isinstance(node.expression, exp.Literal) else ""
            for node in (offset, limit)
            if node is not None
        ]
        if not all(number.isdigit() for number in numbers):
            return None
        return (int(numbers[0]) if offset is not None else 0), int(numbers[-1])


def quoted_row() -> exp.Column:
    return exp.column(exp.to_identifier(ROW, quoted=True))


def _order_by_row(final: exp.Select) -> None:
    order = final.args.get("order")
    if order is None:
        order = exp.Order(expressions=[])
    elif any(sql_of(item.this).upper() == "ALL" for item in order.expressions):
        return
    final.set(
        "order",
        exp.Order(expressions=[*order.expressions, exp.Ordered(this=stage_column(ROW))]),
    )
