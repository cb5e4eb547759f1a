# SPDX-License-Identifier: Apache-2.0
"""A DuckDB connection whose statements may call llm()."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal, get_args

import duckdb

from vllm_relay.tables.engines.lazy import LazyEngine, StoppableEngine, engine_of, in_thread
from vllm_relay.tables.images import ImageStore
from vllm_relay.tables.jobs.options import JobOptions
from vllm_relay.tables.sql.database import TemporaryTables
from vllm_relay.tables.sql.explain import Explanation, estimates
from vllm_relay.tables.sql.expressions import SqlError
from vllm_relay.tables.sql.jobs import JobRunner, StatementJobs
from vllm_relay.tables.sql.replay.answers import Answers
from vllm_relay.tables.sql.replay.functions import Functions
from vllm_relay.tables.sql.replay.passes import Passes, one_view
from vllm_relay.tables.sql.replay.replayed import Replayed
from vllm_relay.tables.sql.replay.statement import Given, Kind, check, kind_of, query_of, split
from vllm_relay.tables.sql.result import Result
from vllm_relay.tables.sql.rewrites.error_columns import add_error_columns
from vllm_relay.tables.sql.rewrites.filters import add_anchors, filter_groups
from vllm_relay.tables.sql.rewrites.lazy import look_up_late
from vllm_relay.tables.sql.rewrites.volatile import refuse, settle
from vllm_relay.tables.sql.text.answer_columns import AnswerColumns
from vllm_relay.tables.sql.text.edited import Edited
from vllm_relay.tables.texts import literal, quoted
from vllm_relay.tables.tracing import of_report, span

OnError = Literal["null", "column", "raise"]


def connect(
    database: str | PathLike[str] | duckdb.DuckDBPyConnection = ":memory:",
    *,
    engine: Any,
    replicas: int | None = None,
    options: JobOptions | None = None,
    tables: Mapping[str, Any] | None = None,
    on_error: OnError = "null",
    image_folder: str | PathLike[str] | None = None,
) -> Connection:
    """
    Args:
        database: a file, or an open connection, which stays open.
        engine: that answers, see `open_engine`; what is opened here is closed with the connection.
        replicas: of a model that is opened here, see `open_engine`.
        options: of the jobs.
        tables: by name, data frames of pandas or Polars, Arrow tables, or files that DuckDB reads.
        on_error: what a row without an answer gives: NULL, NULL and its error in a column after
            the others, for calls that stand alone in the select list, or an exception.
        image_folder: below which paths of images may lead; None takes no paths.
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
        opened = engine_of(engine, on_close, replicas)
        options = options or JobOptions()
        stoppable = StoppableEngine(lambda: opened)
        runner = JobRunner(stoppable, options)
        on_close.callback(runner.close)
        images = ImageStore(None if image_folder is None else Path(image_folder))
        on_close.callback(images.close)
        made = Connection(
            connection, runner, on_error, on_close, images, options.otlp_traces_endpoint, stoppable
        )
        for name, table in (tables or {}).items():
            _register(connection, name, table)
        if isinstance(opened, LazyEngine) and opened is not engine:
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
        images: that statements refer to.
        otlp_traces_endpoint: see `JobOptions`.
        engine: of the runner, if its jobs can be stopped.

    Raises:
        ValueError: `on_error` is not known.
    """

    def __init__(
        self,
        duckdb_connection: duckdb.DuckDBPyConnection,
        runner: JobRunner,
        on_error: OnError = "null",
        on_close: ExitStack | None = None,
        images: ImageStore | None = None,
        otlp_traces_endpoint: str | None = None,
        engine: StoppableEngine | None = None,
    ) -> None:
        if on_error not in get_args(OnError):
            raise ValueError(
                f"on_error={on_error!r} given, expected one of {list(get_args(OnError))}"
            )
        self.duckdb_connection = duckdb_connection
        self._runner = runner
        self._on_error = on_error
        self._on_close = on_close or ExitStack()
        self._otlp_traces_endpoint = otlp_traces_endpoint
        self._engine = engine
        self._functions = Functions(duckdb_connection, images or ImageStore())
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
        statements = split(text)
        if parameters is not None and any(given.has_call for given in statements):
            raise SqlError(
                "parameters given with a statement that calls llm(): write their values in the "
                "statement, or make a table of them first, with a statement of its own"
            )
        result: Result | None = None
        for given in statements:
            if not given.has_call:
                relation = self.duckdb_connection.sql(given.text, params=parameters)
                result = None if relation is None else Result(relation)
            elif given.is_explained:
                relation = self.duckdb_connection.sql(
                    "SELECT 'llm' AS explain_key, ? AS explain_value",
                    params=[str(self._estimated(given))],
                )
                result = Result(relation)
            else:
                result = self._traced(given)
        return result

    def _traced(self, given: Given) -> Result | None:
        before = replace(self._runner.report)
        attributes = {"db.system.name": "duckdb"}
        with span(self._otlp_traces_endpoint, "llm statement", attributes) as record:
            try:
                return self._replay(given)
            finally:
                self._functions.images.close()
                record(of_report(self._runner.report.since(before)))

    async def sql_async(
        self, text: str, parameters: Sequence[Any] | Mapping[str, Any] | None = None
    ) -> Result | None:
        """`sql` in a thread of its own: other tasks run meanwhile. A connection runs one call at
        a time.

        Where the task is cancelled, the job ends with the next completion, requests that run are
        aborted, and DuckDB's query is interrupted; the cancellation goes on when that is done.
        Answers that came are kept as always, and the connection can be used.
        """
        try:
            return await in_thread(lambda: self.sql(text, parameters), self._stop)
        finally:
            if self._engine is not None:
                self._engine.resume()

    def _stop(self) -> None:
        if self._engine is not None:
            self._engine.stop()
        self.duckdb_connection.interrupt()

    def explain(self, text: str) -> Explanation:
        """What a statement that calls llm() would take; the model is not asked.

        Raises:
            SqlError: as for `sql`, or it is not one statement that calls llm().
        """
        given = split(text)
        if len(given) != 1 or not given[0].has_call:
            raise SqlError(f"{text!r} given, expected one statement that calls llm()")
        return self._estimated(given[0])

    def _read(self, given: Given, is_estimated: bool = False) -> tuple[Edited, Kind, Answers]:
        """A statement whose calls are functions over answers of its own."""
        self._functions.answers = None
        self._functions.ensure()
        edited = Edited(self.duckdb_connection, self._functions, given.body)
        filter_groups(edited)
        look_up_late(edited)
        if is_estimated:
            edited.reads_answers = AnswerColumns(edited).are_read
        edited.add_conditions()
        kind = kind_of(edited)
        answers = Answers(edited.sites, edited.site_order)
        self._functions.answers = answers
        return edited, kind, answers

    def _estimated(self, given: Given) -> Explanation:
        tables = self._new_tables()
        edited, kind, answers = self._read(given, is_estimated=True)
        if not check(edited, kind):
            return Explanation([], given.body.strip(), [edited.text().strip()])
        try:
            return estimates(tables, edited, answers, self._runner, kind)
        finally:
            self._functions.images.close()
            self._left_over.append(tables)

    def _replay(self, given: Given) -> Result | None:
        connection = self.duckdb_connection
        tables = self._new_tables()
        before = replace(self._runner.report)
        jobs = StatementJobs(connection, self._runner, self._on_error == "raise")
        edited, kind, answers = self._read(given)
        cost = self._runner.tokens_per_prompt
        passes = Passes(Replayed(tables, edited, answers, jobs.answer), cost)
        if not check(edited, kind) or kind == "bound":
            relation = connection.sql(edited.text())
            return None if relation is None else Result(relation)
        if self._on_error == "column" and edited.structure.word(0) != "INSERT":
            add_error_columns(edited)
        try:
            if kind == "change":
                refuse(edited)
                add_anchors(edited)
                passes.run(edited.text)
                text = edited.text()
            else:
                query = query_of(edited) if kind == "of query" else None
                with one_view(connection):
                    settle(tables, edited)
                    add_anchors(edited)
                    table = passes.table_of(
                        lambda: edited.text(None if query is None else query.range)
                    )
                text = f"FROM {table}"
                if query is not None:
                    begin, end = edited.structure.span(query.range)
                    text = f"{edited.structure.text[:begin]}{text} {edited.structure.text[end:]}"
            relation = connection.sql(text)
        except BaseException:
            # later, as a transaction of the caller may be broken now
            self._left_over.append(tables)
            raise
        report = self._runner.report.since(before)
        num_lost = 0 if jobs.num_answered else jobs.num_failed
        result = Result(relation, jobs.errors, report, num_lost)
        if kind == "query" or edited.structure.word(0) == "SUMMARIZE":
            weakref.finalize(result, self._left_over.append, tables)
        else:
            tables.drop_all()
        return result

    def _new_tables(self) -> TemporaryTables:
        while self._left_over:
            self._left_over.pop().drop_all()
        return TemporaryTables(self.duckdb_connection)
