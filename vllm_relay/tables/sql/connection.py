# SPDX-License-Identifier: Apache-2.0
"""A DuckDB connection whose statements may call llm()."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from os import PathLike, fspath
from typing import Any, Literal, get_args

import duckdb
from sqlglot import exp

from vllm_relay.tables.engines.lazy import LazyEngine
from vllm_relay.tables.engines.opening import is_engine, open_engine
from vllm_relay.tables.identifiers import literal, quoted
from vllm_relay.tables.jobs.estimate import JobReport
from vllm_relay.tables.jobs.job_runner import JobRunner
from vllm_relay.tables.jobs.options import JobOptions
from vllm_relay.tables.sql.binder import Binder
from vllm_relay.tables.sql.checks import check_statement, without_asking
from vllm_relay.tables.sql.error_columns import with_error_columns
from vllm_relay.tables.sql.errors import SqlError
from vllm_relay.tables.sql.explain import EstimateAsker, Explanation, plan_steps
from vllm_relay.tables.sql.expressions import sql_of
from vllm_relay.tables.sql.jobs import JobAsker
from vllm_relay.tables.sql.queries import QueryRunner
from vllm_relay.tables.sql.result import Result
from vllm_relay.tables.sql.runner import Runner
from vllm_relay.tables.sql.statements import Statement, split_statements, with_query
from vllm_relay.tables.sql.temporary_tables import TemporaryTables

OnError = Literal["null", "column", "raise"]


def connect(
    database: str | PathLike[str] | duckdb.DuckDBPyConnection = ":memory:",
    *,
    engine: Any,
    options: JobOptions | None = None,
    tables: Mapping[str, Any] | None = None,
    on_error: OnError = "null",
) -> Connection:
    """
    Args:
        database: a file, or an open connection, which stays open.
        engine: that answers, see `open_engine`; what is opened here is closed with the connection.
        options: of the jobs.
        tables: by name, data frames of pandas or Polars, Arrow tables, or files that DuckDB reads.
        on_error: what a row without an answer gives: NULL, NULL and its error in a column after
            the others, for calls that stand alone in the select list, or an exception.
    """
    if isinstance(database, duckdb.DuckDBPyConnection):
        connection = database
    else:
        connection = duckdb.connect(fspath(database))
    with ExitStack() as on_failure:
        on_close = ExitStack()
        on_failure.callback(on_close.close)
        if connection is not database:
            on_close.callback(connection.close)
        opened = engine if is_engine(engine) else LazyEngine(lambda: open_engine(engine))
        runner = JobRunner(connection, opened, options or JobOptions())
        on_close.callback(runner.close)
        made = Connection(connection, runner, on_error, on_close)
        for name, table in (tables or {}).items():
            _register(connection, name, table)
        if isinstance(opened, LazyEngine) and opened is not engine:
            on_close.callback(opened.close)
            opened.open()  # last of all: it may take minutes
        on_failure.pop_all()
    return made


def _register(connection: duckdb.DuckDBPyConnection, name: str, table: Any) -> None:
    if isinstance(table, (str, PathLike)):
        path = literal(fspath(table))
        connection.execute(f"CREATE OR REPLACE TEMP VIEW {quoted(name)} AS FROM {path}")
    else:
        connection.register(name, table.to_arrow() if hasattr(table, "to_arrow") else table)


class Connection:
    """
    Args:
        duckdb_connection: of DuckDB.
        runner: of the jobs on it.
        on_error: see `connect`.
        on_close: what `close` closes.

    Raises:
        ValueError: `on_error` is not known.
    """

    def __init__(
        self,
        duckdb_connection: duckdb.DuckDBPyConnection,
        runner: Runner,
        on_error: OnError = "null",
        on_close: ExitStack | None = None,
    ) -> None:
        if on_error not in get_args(OnError):
            raise ValueError(
                f"on_error={on_error!r} given, expected one of {list(get_args(OnError))}"
            )
        self.duckdb_connection = duckdb_connection
        self._runner = runner
        self._on_error = on_error
        self._on_close = on_close or ExitStack()
        # tables of results that nobody has any more; a finalizer may not use the connection
        self._left_over: list[TemporaryTables] = []

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the checkpoint, and the engine and the database if they were opened here; results
        are gone with the database."""
        self._on_close.close()

    def sql(
        self, text: str, parameters: Sequence[Any] | Mapping[str, Any] | None = None
    ) -> Result | None:
        """Run statements; those without llm() go to DuckDB as they are.

        Args:
            parameters: for the ``?``, ``$1`` or ``$name`` of a statement without llm().

        Returns:
            What the last statement gives; None if it gives nothing.

        Raises:
            SqlError: a call of llm() is not one, or stands where it cannot be answered, or beside
                parameters.
            AnswerFailedError: a row has no answer, with ``on_error="raise"``.
            duckdb.Error: DuckDB does not take a statement.
        """
        statements = split_statements(text)
        if parameters is not None and any(each.tree is not None for each in statements):
            raise SqlError(
                "parameters given with a statement that calls llm(): write their values in the "
                "statement, or make a table of them first, with a statement of its own"
            )
        result: Result | None = None
        for statement in statements:
            if statement.tree is None:
                relation = self.duckdb_connection.sql(statement.text, params=parameters)
                result = None if relation is None else Result(relation)
            elif statement.is_explained:
                relation = self.duckdb_connection.sql(
                    "SELECT 'llm' AS explain_key, ? AS explain_value",
                    params=[str(self._explained(statement))],
                )
                result = Result(relation)
            else:
                result = self._run(statement.tree)
        return result

    def explain(self, text: str) -> Explanation:
        """What a statement that calls llm() would take; the model is not asked.

        Raises:
            SqlError: as for `sql`, or it is not one statement that calls llm().
        """
        statements = split_statements(text)
        if len(statements) != 1 or statements[0].tree is None:
            raise SqlError(f"{text!r} given, expected one statement that calls llm()")
        return self._explained(statements[0])

    def _explained(self, statement: Statement) -> Explanation:
        assert statement.tree is not None
        before = statement.tree.sql("duckdb", pretty=True, normalize_functions=False)
        check_statement(self.duckdb_connection, statement.tree)
        free = without_asking(self.duckdb_connection, statement.tree)
        if free is not None:
            return Explanation([], before, [free])
        asker = EstimateAsker(self.duckdb_connection, self._runner)
        tables = self._new_tables()
        binder = Binder(self.duckdb_connection)
        runner = QueryRunner(binder, tables, asker)
        try:
            with_query(statement.tree, runner.run)
        finally:
            self._left_over.append(tables)
        return Explanation(asker.calls, before, plan_steps(runner.plans))

    def _new_tables(self) -> TemporaryTables:
        while self._left_over:
            self._left_over.pop().drop_all()
        return TemporaryTables(self.duckdb_connection)

    def _run(self, tree: exp.Expr) -> Result | None:
        check_statement(self.duckdb_connection, tree)
        free = without_asking(self.duckdb_connection, tree)
        if free is not None:
            return Result(self.duckdb_connection.sql(free))
        tables = self._new_tables()
        before = JobReport(**vars(self._runner.report))
        asker = JobAsker(self.duckdb_connection, self._runner, self._on_error == "raise")
        binder = Binder(self.duckdb_connection)
        runner = QueryRunner(binder, tables, asker)
        # the columns of the target of an INSERT are given
        has_error_columns = self._on_error == "column" and not isinstance(tree, exp.Insert)

        def changed_query(query: exp.Query) -> exp.Query:
            changed = runner.run(query)
            if not has_error_columns or not runner.plans:
                return changed
            return with_error_columns(changed, runner.plans[-1])

        try:
            changed, is_query = with_query(tree, changed_query)
            if is_query and binder.has_volatile(changed):
                # it would differ each time it is read
                changed = exp.select("*").from_(tables.create(sql_of(changed)))
            relation = self.duckdb_connection.sql(sql_of(changed))
        except BaseException:
            # later, as a transaction of the caller may be broken now
            self._left_over.append(tables)
            raise
        report = _difference(self._runner.report, before)
        result = Result(relation, asker.errors, report)
        if is_query:
            weakref.finalize(result, self._left_over.append, tables)
        else:
            tables.drop_all()
        return result


def _difference(after: JobReport, before: JobReport) -> JobReport:
    names = [field.name for field in fields(JobReport)]
    return JobReport(**{name: getattr(after, name) - getattr(before, name) for name in names})
