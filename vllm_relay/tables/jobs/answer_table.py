# SPDX-License-Identifier: Apache-2.0
"""Answers of rows, on their way into DuckDB."""

from __future__ import annotations

from typing import Any

import duckdb
import pyarrow as pa

from vllm_relay.tables.identifiers import ANSWER, ERROR, IS_CUT, quoted
from vllm_relay.tables.jobs.answers import ARROW_TYPES, Answer
from vllm_relay.tables.jobs.job_rows import JobRows
from vllm_relay.tables.outputs import AnswerValue, Output

_ROWS_PER_INSERT = 4096


class AnswerTable:
    """A temporary table of a job's rows by number, with an answer or an error.

    Args:
        connection: to DuckDB.
        rows: that are asked about.
        output: what the answers are.
        target: the name of the table that `write` makes.

    Raises:
        ValueError: the target is there already, or a field has the name of one of its columns.
    """

    def __init__(
        self, connection: duckdb.DuckDBPyConnection, rows: JobRows, output: Output, target: str
    ) -> None:
        self._connection = connection
        self._rows = rows
        self._output = output
        self._target = target
        self._name = f"{rows.name}_answers"
        self._schema = pa.schema(
            [
                ("number", pa.int64()),
                (ANSWER, ARROW_TYPES[output.type]),
                (ERROR, pa.string()),
                (IS_CUT, pa.bool_()),
            ]
        )
        self._pending: list[tuple[int, AnswerValue | None, str | None, bool]] = []
        self._check_names()
        connection.execute(
            f"CREATE TEMP TABLE {self._name} (number BIGINT, {ANSWER} {output.sql_type}, "
            f"{ERROR} VARCHAR, {IS_CUT} BOOLEAN)"
        )

    def add(self, numbers: list[int], answer: Answer) -> None:
        """See `Answers`."""
        self._pending += [(number, answer.value, answer.error, answer.is_cut) for number in numbers]
        if len(self._pending) >= _ROWS_PER_INSERT:
            self._insert()

    def add_error_to_rest(self, error: str) -> None:
        """Of all rows that have no answer and no error."""
        self._insert()
        self._connection.execute(
            f"INSERT INTO {self._name} SELECT number, NULL, ?, false FROM {self._rows.name} "
            f"WHERE number NOT IN (SELECT number FROM {self._name})",
            [error],
        )

    def write(self, *, tells_cut: bool = False) -> None:
        """Make the target: the rows' fields, their answers and errors, and which were cut."""
        self._insert()
        cut = f", {IS_CUT}" if tells_cut else ""
        fields = ", ".join(
            f"{column} AS {quoted(name)}"
            for column, name in zip(self._rows.columns, self._rows.fields, strict=True)
        )
        self._connection.execute(
            f"CREATE TEMP TABLE {quoted(self._target)} AS SELECT {fields}, {ANSWER}, {ERROR}{cut} "
            f"FROM {self._rows.name} JOIN {self._name} USING (number) ORDER BY number"
        )

    def drop(self) -> None:
        self._connection.execute(f"DROP TABLE IF EXISTS {self._name}")

    def _check_names(self) -> None:
        # before anything is spent
        taken = [name for name in self._rows.fields if name.lower() in (ANSWER, ERROR)]
        if taken:
            raise ValueError(
                f"fields {taken} given: results have columns {ANSWER!r} and {ERROR!r} of their "
                f"own, give the fields other names, as in {{name: expression}}"
            )
        found = self._connection.execute(
            "SELECT count(*) FROM duckdb_tables() WHERE temporary AND lower(table_name) = lower(?)",
            [self._target],
        ).fetchone()
        if found != (0,):
            raise ValueError(f"target {self._target!r} given: there is such a temporary table")

    def _insert(self) -> None:
        if not self._pending:
            return
        columns: list[Any] = [
            pa.array(column, field.type)
            for column, field in zip(zip(*self._pending, strict=True), self._schema, strict=True)
        ]
        view = f"{self._name}_new"
        self._connection.register(view, pa.table(columns, self._schema))
        self._connection.execute(f"INSERT INTO {self._name} SELECT * FROM {view}")
        self._connection.unregister(view)
        self._pending.clear()
