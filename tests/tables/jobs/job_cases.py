# SPDX-License-Identifier: Apache-2.0
"""Tables, questions and runners for the tests of jobs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb

from vllm_relay.tables.engines.base import Engine
from vllm_relay.tables.jobs.job_runner import JobRunner
from vllm_relay.tables.jobs.options import JobOptions
from vllm_relay.tables.question import Question


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


def runner(
    connection: duckdb.DuckDBPyConnection,
    engine: Engine,
    checkpoint: Path | None = None,
    **options: Any,
) -> JobRunner:
    return JobRunner(
        connection, engine, JobOptions(checkpoint=checkpoint, show_progress=False, **options)
    )


def answered(connection: duckdb.DuckDBPyConnection, target: str = "out") -> list[tuple[Any, ...]]:
    return connection.execute(f"SELECT * FROM {target}").fetchall()


def temporary_tables(connection: duckdb.DuckDBPyConnection) -> Sequence[str]:
    found = connection.execute("SELECT table_name FROM duckdb_tables() WHERE temporary").fetchall()
    return [name for (name,) in found]
