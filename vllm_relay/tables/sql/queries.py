# SPDX-License-Identifier: Apache-2.0
"""A query with calls of llm() at any depth becomes one without: inner SELECTs come first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import duckdb
from sqlglot import exp

from vllm_relay.tables.sql.asker import Asker
from vllm_relay.tables.sql.binder import Binder, query_text
from vllm_relay.tables.sql.errors import error_at
from vllm_relay.tables.sql.execute import SelectExecution
from vllm_relay.tables.sql.expressions import (
    RESERVED,
    all_of,
    ancestors,
    conjuncts,
    fold,
    has_call,
    is_call,
    is_query,
    outermost_queries,
)
from vllm_relay.tables.sql.grouping import ask_after_grouping
from vllm_relay.tables.sql.plan import plan_select
from vllm_relay.tables.sql.probe import name_calls, probe
from vllm_relay.tables.sql.pushdown import push_down
from vllm_relay.tables.sql.select_plan import SelectPlan
from vllm_relay.tables.sql.temporary_tables import TemporaryTables

# after these joins a row of the left side is there once or more, or not at all, as it was before
_KEEPING_SIDES = ("", "LEFT")
_KEEPING_KINDS = ("", "INNER", "CROSS", "SEMI", "ANTI", "OUTER")


@dataclass
class QueryRunner:
    """Answers the calls of one query.

    Attributes:
        binder: of the connection.
        tables: in which the steps are kept.
        asker: that answers.
        plans: of the SELECTs with calls, in the order in which they were run.
    """

    binder: Binder
    tables: TemporaryTables
    asker: Asker
    plans: list[SelectPlan] = field(default_factory=list)

    def run(self, query: exp.Query) -> exp.Query:
        """The query over temporary tables that hold the answers.

        Raises:
            SqlError: a call is not called as it should be, or stands where it cannot be answered.
            duckdb.Error: the query is not valid.
        """
        names: set[str] = set()
        for cte in query.find_all(exp.CTE):
            if fold(cte.alias) in names:
                raise error_at(
                    cte, f"WITH gives the name {cte.alias!r} a second time: use another name"
                )
            names.add(fold(cte.alias))
        done = self.without_calls(name_calls(query))
        for call in done.find_all(exp.Anonymous):
            if is_call(call):
                raise error_at(
                    call, "llm() where it cannot be asked: ask in the select list of a subquery"
                )
        return done

    def without_calls(self, query: exp.Query, ctes: Sequence[exp.CTE] = ()) -> exp.Query:
        """As `run`, of a part of the query.

        Args:
            query: it keeps its own common table expressions.
            ctes: that it may use beside them, without calls.
        """
        if not has_call(query):
            return query.copy()
        query = query.copy()
        own = self._own_ctes(query, ctes)
        visible = [*ctes, *own]
        if isinstance(query, exp.Subquery):
            query.set("this", self.without_calls(query.this, visible))
        elif isinstance(query, exp.SetOperation):
            query.set("this", self._branch(query.this, visible))
            query.set("expression", self._branch(query.expression, visible))
        else:
            assert isinstance(query, exp.Select)
            query = self._select(query, visible)
        if own:
            query.set("with_", exp.With(expressions=own))
        return query

    def _own_ctes(self, query: exp.Query, ctes: Sequence[exp.CTE]) -> list[exp.CTE]:
        """The common table expressions of a query, without calls; they leave the query."""
        with_ = query.args.get("with_")
        if with_ is None:
            return []
        query.set("with_", None)
        self._inline(query, with_)
        done: list[exp.CTE] = []
        for cte in with_.expressions:
            is_recursive = with_.recursive and bool(_uses(cte.this, cte.alias))
            if has_call(cte) and is_recursive:
                raise error_at(cte, f"llm() in WITH RECURSIVE {cte.alias!r}: it cannot be answered")
            users = [query, *with_.expressions]
            num_uses = sum(len(_uses(user, cte.alias)) for user in users)
            visible = [*ctes, *done]
            changed = cte.copy()
            if has_call(cte):
                if not num_uses:
                    continue
                body = self.without_calls(cte.this, visible)
            else:
                body = cte.this.copy()
            if is_recursive:
                alone = exp.select("*").from_(exp.to_identifier(cte.alias, quoted=True))
                alone.set("with_", exp.With(expressions=[cte.copy()], recursive=True))
                body = exp.select("*").from_(alone.subquery(RESERVED + "r"))
            if is_recursive or num_uses > 1 or self.binder.has_volatile(body):
                # several statements will read it, and have to see the same rows
                table = self.tables.create(query_text(body, visible))
                body = exp.select("*").from_(table)
            changed.set("this", body)
            done.append(changed)
        return done

    def _inline(self, query: exp.Query, with_: exp.With) -> None:
        """Make what is asked in WITH and used once a subquery, into which conditions can go."""
        if with_.recursive:
            return
        for cte in list(with_.expressions):
            uses = [
                table for user in (query, *with_.expressions) for table in _uses(user, cte.alias)
            ]
            if len(uses) != 1 or not has_call(cte) or cte.args.get("materialized") is not None:
                continue
            table = uses[0]
            if {key for key, value in table.args.items() if value} - {"this", "alias"}:
                continue
            if table.find_ancestor(exp.CTE, exp.Select) is None:
                continue
            alias = table.args.get("alias") or exp.TableAlias(this=cte.args["alias"].this.copy())
            names = alias.columns or cte.args["alias"].columns
            alias = exp.TableAlias(this=alias.this.copy(), columns=[n.copy() for n in names])
            table.replace(exp.Subquery(this=cte.this.copy(), alias=alias))
            cte.pop()

    def _branch(self, branch: exp.Query, ctes: Sequence[exp.CTE]) -> exp.Query:
        """One side of a UNION, which has no order or limit of its own but in brackets."""
        if not has_call(branch):
            return branch.copy()
        done = self.without_calls(branch, ctes)
        return done if isinstance(done, (exp.SetOperation, exp.Subquery)) else done.subquery()

    def _select(self, select: exp.Select, ctes: Sequence[exp.CTE]) -> exp.Select:
        names = [name for name, _ in self.binder.columns(probe(select), ctes)]
        self._move_join_conditions(select, ctes)
        push_down(select, self.binder, ctes)
        self._sources(select, ctes)
        self._subqueries(select, ctes)
        if not has_call(select):
            return select
        asking = ask_after_grouping(select, self.binder, ctes, names)
        if asking is not None:
            select = asking
            self._sources(select, ctes)
        plan = plan_select(select, self.binder, ctes, names)
        self.plans.append(plan)
        self.asker.reads_answers = _reads_answers(plan.stage, ctes)
        return SelectExecution(plan, self.tables, self.asker).run(ctes)

    def _move_join_conditions(self, select: exp.Select, ctes: Sequence[exp.CTE]) -> None:
        """Conditions with calls of inner joins become ones of WHERE."""
        joins = select.args.get("joins") or []
        for index, join in enumerate(joins):
            condition = join.args.get("on")
            if not _has_own_call(condition):
                continue
            later = joins[index:]
            is_inner = not join.side and not join.method and join.kind in ("", "INNER")
            if not is_inner or not all(map(_keeps_left, later)):
                parts_of_kind = (join.method, join.side, join.kind, "JOIN")
                kind = " ".join(part for part in parts_of_kind if part)
                raise error_at(
                    condition,
                    f"llm() in ON of {kind}, or before an outer join: only the ON of inner joins "
                    f"can ask; ask in a subquery that is joined, or in WHERE",
                )
            parts = conjuncts(condition)
            free = all_of(part for part in parts if not has_call(part))
            join.set("on", free if free is not None else exp.true())
            asked = all_of(part for part in parts if has_call(part))
            assert asked is not None
            self._name_tables(asked, select, joins[: index + 1], ctes)
            select.where(asked, copy=False)

    def _name_tables(
        self,
        condition: exp.Expr,
        select: exp.Select,
        joins: list[exp.Join],
        ctes: Sequence[exp.CTE],
    ) -> None:
        """Say of which of the joined tables columns are, as later ones may have their names."""
        source = exp.Select(from_=select.args["from_"].copy(), joins=[j.copy() for j in joins])
        tables = [select.args["from_"].this.alias_or_name]
        tables += [join.this.alias_or_name for join in joins]
        for column in list(condition.find_all(exp.Column)):
            if column.table or isinstance(column.this, exp.Star):
                continue
            found = []
            for table in tables:
                named = exp.column(column.this.copy(), table=exp.to_identifier(table, quoted=True))
                if self.binder.is_valid(source.select(named), ctes):
                    found.append(named)
            if len(found) == 1:
                column.replace(found[0])

    def _sources(self, select: exp.Select, ctes: Sequence[exp.CTE]) -> None:
        """SELECTs with calls in FROM."""
        sources = [select.args.get("from_"), *(select.args.get("joins") or [])]
        sources += select.args.get("laterals") or []
        for source in sources:
            if source is None or not has_call(source):
                continue
            for query in outermost_queries(source):
                if has_call(query):
                    query.replace(self._standalone(query, ctes))
            if has_call(source):
                raise error_at(
                    source,
                    "llm() as an argument in FROM: ask in a subquery, FROM (SELECT llm(...) ...)",
                )

    def _subqueries(self, select: exp.Select, ctes: Sequence[exp.CTE]) -> None:
        """Subqueries with calls in expressions."""
        for query in outermost_queries(select):
            if has_call(query):
                if any(is_call(parent) for parent in ancestors(query)):
                    raise error_at(
                        query, "a subquery with llm() in a field of llm(): ask in FROM or WITH"
                    )
                query.replace(self._standalone(query, ctes))

    def _standalone(self, query: exp.Query, ctes: Sequence[exp.CTE]) -> exp.Query:
        try:
            self.binder.columns(probe(query), ctes)
        except duckdb.BinderException as error:
            raise error_at(
                query,
                f"a subquery with llm() that uses columns of the query around it, which cannot be "
                f"asked before that: join instead ({str(error).splitlines()[0]})",
            ) from None
        return self.without_calls(query, ctes)


def _reads_answers(query: exp.Query, ctes: Sequence[exp.CTE]) -> bool:
    """Whether a query reads what the answers of another one are in."""
    names = {table.name for table in query.find_all(exp.Table)}
    used = [cte for cte in ctes if fold(cte.alias) in map(fold, names)]
    return any(name.startswith(RESERVED) for name in names) or any(
        _reads_answers(cte.this, [other for other in ctes if other is not cte]) for cte in used
    )


def _keeps_left(join: exp.Join) -> bool:
    return (
        join.side in _KEEPING_SIDES
        and join.kind in _KEEPING_KINDS
        and (join.method or "") in ("", "ASOF", "NATURAL")
    )


def _has_own_call(node: exp.Expr | None) -> bool:
    """Whether there is a call outside of subqueries."""
    if node is None:
        return False
    outside = node.walk(prune=is_query)
    return any(is_call(part) for part in outside)


def _uses(node: exp.Expr, name: str) -> list[exp.Table]:
    """Where a table of this name is read."""
    tables = node.find_all(exp.Table)
    return [table for table in tables if fold(table.name) == fold(name) and not table.db]
