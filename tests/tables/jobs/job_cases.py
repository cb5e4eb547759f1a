# SPDX-License-Identifier: Apache-2.0
"""Tables, questions and runners for the tests of jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from vllm_relay.tables.engines.base import Engine
from vllm_relay.tables.jobs.asking import Asker
from vllm_relay.tables.jobs.options import JobOptions
from vllm_relay.tables.jobs.report import Estimate, JobReport
from vllm_relay.tables.jobs.rows import Rows
from vllm_relay.tables.question import Question
from vllm_relay.tables.texts import json_text, quoted


def numbers_table(num_rows: int, num_groups: int = 10) -> duckdb.DuckDBPyConnection:
    """A table `t` with a row per `id`, and a `kind` that rows share."""
    connection = duckdb.connect()
    connection.execute(
        f"CREATE TABLE t AS SELECT i AS id, 'kind ' || i % {num_groups} AS kind "
        f"FROM range({num_rows}) AS numbers(i)"
    )
    return connection


NUMBERS = Question("Which kind?", ("id", "kind"), max_tokens=8)
NUMBERS_SQL = "SELECT id, kind FROM t"


class QueryJobs:
    """Asks about the rows of queries, with one `Asker`.

    Attributes:
        report: of all jobs so far.
    """

    def __init__(
        self, connection: duckdb.DuckDBPyConnection, engine: Engine, options: JobOptions
    ) -> None:
        self._connection = connection
        self._engine = engine
        self.asker = Asker(options)
        self.report = JobReport()

    def answer(self, source: str, question: Question, target: str) -> None:
        """Make a table of the different rows of a query, in the order in which they first come,
        with the columns ``relay_answer`` and ``relay_error``."""
        rows = self._rows(source, question)
        self.asker.ask(rows, question, self._engine, self.report)
        found = rows.table(question.output)
        numbered = pa.table({"place": pa.array(range(found.num_rows)), "a": found["answer"],
                             "e": found["error"]})  # fmt: skip
        self._connection.register("found", numbered)
        columns = [f"field_{place}" for place in range(len(question.fields))]
        listed = ", ".join(
            f"{column} AS {quoted(name)}"
            for column, name in zip(columns, question.fields, strict=True)
        )
        shown = ", ".join(f"to_json({column})" for column in columns)
        self._connection.execute(
            f"CREATE TEMP TABLE {target} AS SELECT {listed}, "
            "a AS relay_answer, e AS relay_error "
            f"FROM (SELECT *, row_number() OVER () - 1 AS place FROM (\n{source}\n) "
            f"AS source({', '.join(columns)})) JOIN found USING (place) "
            f"QUALIFY row_number() OVER (PARTITION BY {shown} ORDER BY place) = 1 ORDER BY place"
        )
        self._connection.unregister("found")

    def estimate(self, source: str, question: Question) -> Estimate:
        return self.asker.estimate(self._rows(source, question), question, self._engine)

    def close(self) -> None:
        self.asker.close()

    def _rows(self, source: str, question: Question) -> Rows:
        columns = [f"field_{place}" for place in range(len(question.fields))]
        given = f"FROM (\n{source}\n) AS source({', '.join(columns)})"
        types = self._connection.sql(given).types
        shown = [
            f"{json_text(name, type)} AS {name}" for name, type in zip(columns, types, strict=True)
        ]
        return Rows(self._connection.sql(f"SELECT {', '.join(shown)} {given}").to_arrow_table())


def runner(
    connection: duckdb.DuckDBPyConnection,
    engine: Engine,
    checkpoint: Path | None = None,
    **options: Any,
) -> QueryJobs:
    return QueryJobs(
        connection, engine, JobOptions(checkpoint=checkpoint, show_progress=False, **options)
    )


def answered(connection: duckdb.DuckDBPyConnection, target: str = "out") -> list[tuple[Any, ...]]:
    return connection.execute(f"SELECT * FROM {target}").fetchall()
