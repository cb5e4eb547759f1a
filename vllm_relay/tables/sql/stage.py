# SPDX-License-Identifier: Apache-2.0
"""The columns of the table that holds a SELECT's rows while its calls are answered."""

from __future__ import annotations

from collections.abc import Sequence

from sqlglot import exp

from vllm_relay.tables.sql.binder import Binder
from vllm_relay.tables.sql.calls import Field, is_star
from vllm_relay.tables.sql.errors import error_at
from vllm_relay.tables.sql.expressions import (
    RESERVED,
    ROW,
    STAGE,
    ancestors,
    fold,
    is_query,
    replace_in,
    sql_of,
    stage_column,
)

_SOURCE_PARTS = ("from_", "joins", "laterals", "sample")


class StageColumns:
    """What later steps read of a SELECT's rows; only that is kept.

    A column that is referred to without a table keeps its name, so that DuckDB goes on to tell
    columns from aliases by its own rules.

    Args:
        select: whose FROM gives the rows.
        binder: of the connection.
        ctes: that the SELECT may use.
    """

    def __init__(self, select: exp.Select, binder: Binder, ctes: Sequence[exp.CTE]) -> None:
        self._source = {part: select.args[part] for part in _SOURCE_PARTS if select.args.get(part)}
        self._binder = binder
        self._ctes = ctes
        self._expressions: dict[str, exp.Expr] = {}
        self._by_text: dict[str, str] = {}
        self._by_name: dict[str, str] = {}
        self._stars: dict[str, list[tuple[str, exp.Column]]] = {}
        self._is_column: dict[str, bool] = {}
        names: list[str] = []
        if "from_" in self._source:
            names = [fold(name) for name, _ in self._described(exp.Star())]
        joins = self._source.get("joins", [])
        merged = [fold(part.name) for join in joins for part in join.args.get("using") or []]
        self._merged_names = set(merged)
        if any(join.method == "NATURAL" for join in joins):
            self._merged_names |= set(names)
        self._plain_names = {name for name in names if names.count(name) == 1}

    def _query(self, item: exp.Expr) -> exp.Select:
        query = exp.Select(expressions=[item.copy()])
        for part, node in self._source.items():
            query.set(part, [n.copy() for n in node] if isinstance(node, list) else node.copy())
        return query

    def _described(self, item: exp.Expr) -> list[tuple[str, str]]:
        return self._binder.columns(self._query(item), self._ctes)

    def is_column(self, reference: exp.Column) -> bool:
        """Whether a reference is one to the rows that the SELECT reads."""
        if not reference.table and fold(reference.name) in self._plain_names:
            return True
        if "from_" not in self._source:
            return False
        text = fold(sql_of(reference))
        if text not in self._is_column:
            self._is_column[text] = self._binder.is_valid(self._query(reference), self._ctes)
        return self._is_column[text]

    def is_plain(self, reference: exp.Column) -> bool:
        """Whether a reference means the only column that has its name, with or without a table."""
        if fold(reference.name) not in self._plain_names:
            return False
        # the first part could be a column with fields, the name one of USING
        return not reference.table or (
            fold(reference.parts[0].name) not in self._plain_names
            and fold(reference.name) not in self._merged_names
            and self.is_column(reference)
        )

    def add(self, expression: exp.Expr) -> exp.Column:
        """A column of its own for the value of an expression."""
        name = f"{RESERVED}c{len(self._expressions)}"
        self._expressions[name] = expression.copy()
        return stage_column(name)

    def is_star_item(self, item: exp.Expr) -> bool:
        """Whether an item of the select list stands for several."""
        # t.* LIKE 'a%', or any other such operator, chooses columns
        chooses = isinstance(item, exp.Binary) and is_star(item.this)
        return is_star(item) or isinstance(item, exp.Columns) or chooses

    def star(self, item: exp.Expr) -> list[tuple[str, exp.Column]]:
        """Names and columns of the stage that a star stands for."""
        text = sql_of(item)
        if text not in self._stars:
            described = self._described(item)
            first = len(self._expressions)
            columns = [(name, f"{RESERVED}c{first + i}") for i, (name, _) in enumerate(described)]
            for _, column in columns:
                self._expressions[column] = exp.Null()
            # one item gives all of them
            self._expressions[columns[0][1]] = item.copy()
            for _, column in columns[1:]:
                self._expressions[column] = _Covered()
            self._stars[text] = [(name, stage_column(column)) for name, column in columns]
        return [(name, column.copy()) for name, column in self._stars[text]]

    def star_fields(self, item: exp.Expr) -> list[Field]:
        return [Field(name, column) for name, column in self.star(item)]

    def expand_star(self, item: exp.Expr) -> list[exp.Expr]:
        """Items of the select list, over the stage."""
        return [exp.alias_(column, name, quoted=True) for name, column in self.star(item)]

    def over_stage(self, root: exp.Expr) -> exp.Expr:
        """A copy that reads the stage; what it needs becomes a column of it.

        Raises:
            SqlError: columns are chosen by pattern inside an expression.
        """

        def change(part: exp.Expr) -> exp.Expr | None:
            if isinstance(part, exp.PositionalColumn):
                raise error_at(
                    part,
                    f"a query with llm() names the column by its number, {sql_of(part)}: use "
                    f"its name",
                )
            is_count = isinstance(part.parent, (exp.Count, exp.Column))
            if isinstance(part, exp.Columns) or (isinstance(part, exp.Star) and not is_count):
                raise error_at(part, f"{sql_of(part)} inside an expression of a query with llm()")
            if not isinstance(part, exp.Column) or part.table == STAGE:
                return None
            if isinstance(part.this, exp.Star):
                raise error_at(part, f"{sql_of(part)} inside an expression of a query with llm()")
            return self._reference(part)

        # replace_in works on a copy, whose parents tell what a subquery names itself
        return replace_in(root, change)

    def _reference(self, reference: exp.Column) -> exp.Expr:
        if fold(reference.parts[0].name) in _names_of_subqueries(reference):
            return reference
        if not self.is_column(reference):
            return reference
        text = fold(sql_of(reference))
        if not reference.table or self.is_plain(reference):
            # the same column for DuckDB with and without its table
            key = fold(reference.name)
            if key not in self._by_name:
                self._by_name[key] = reference.name
                self._expressions[reference.name] = reference.copy()
            return stage_column(self._by_name[key]) if reference.table else reference
        if text not in self._by_text:
            self._by_text[text] = self.add(reference).name
        return stage_column(self._by_text[text])

    def stage(
        self, where: exp.Expr | None, qualify: exp.Expr | None, order: list[exp.Expr]
    ) -> exp.Select:
        """The SELECT that fills the stage, with a number for each row that grows.

        Args:
            where: which rows.
            qualify: which of these, by windows over them.
            order: of the rows; [] keeps the order in which they are read.
        """
        window = exp.Window(
            this=exp.RowNumber(),
            order=exp.Order(expressions=[item.copy() for item in order]) if order else None,
        )
        items: list[exp.Expr] = [window]
        names = [ROW]
        for name, expression in self._expressions.items():
            names.append(name)
            if not isinstance(expression, _Covered):
                items.append(expression.copy())
        inner = self._query(exp.Null())
        inner.set("expressions", items)
        if where is not None:
            inner.set("where", exp.Where(this=where.copy()))
        if qualify is not None:
            inner.set("qualify", exp.Qualify(this=qualify.copy()))
        alias = exp.TableAlias(
            this=exp.to_identifier(STAGE),
            columns=[exp.to_identifier(name, quoted=True) for name in names],
        )
        return exp.select("*").from_(exp.Subquery(this=inner, alias=alias))


class _Covered(exp.Null):
    """A column that an item before it gives."""


def _names_of_subqueries(node: exp.Expr) -> set[str]:
    """Tables of the subqueries, inside the expression, in which a node stands."""
    names: set[str] = set()
    for parent in ancestors(node):
        if is_query(parent):
            for source in [parent.args.get("from_"), *(parent.args.get("joins") or [])]:
                if source is not None:
                    names.add(fold(source.this.alias_or_name))
    return names
