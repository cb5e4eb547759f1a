# SPDX-License-Identifier: Apache-2.0
"""Answers of rows, on their way into DuckDB."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import duckdb
import pyarrow as pa

from vllm_relay.tables.jobs.job_rows import JobRows, quoted
from vllm_relay.tables.outputs import AnswerError, AnswerValue, Output

_ROWS_PER_INSERT = 20_000
_ARROW_TYPES = {
    "text": pa.string(),
    "int": pa.int64(),
    "float": pa.float64(),
    "bool": pa.bool_(),
    "json": pa.string(),
}


class AnswerTable:
    """A temporary table of a job's rows by number, with an answer or an error.

    Args:
        connection: to DuckDB.
        rows: that are asked about.
        output: what the answers are.
    """

    def __init__(
        self, connection: duckdb.DuckDBPyConnection, rows: JobRows, output: Output
    ) -> None:
        self._connection = connection
        self._rows = rows
        self._output = output
        self._name = f"{rows.name}_answers"
        self._schema = pa.schema(
            [
                ("number", pa.int64()),
                ("answer", _ARROW_TYPES[output.type]),
                ("error", pa.string()),
            ]
        )
        self._pending: list[tuple[int, AnswerValue | None, str | None]] = []
        self.num_answered = 0
        self.num_errors = 0
        connection.execute(
            f"CREATE TEMP TABLE {self._name} (number BIGINT, answer {output.sql_type}, "
            f"error VARCHAR)"
        )

    def add_text(self, numbers: Sequence[int], text: str) -> None:
        """An answer, which is an error if it is not of the type asked for."""
        try:
            value = self._output.parse(text)
        except AnswerError as error:
            self.add_error(numbers, str(error))
        else:
            self._add([(number, value, None) for number in numbers])

    def add_error(self, numbers: Sequence[int], error: str) -> None:
        self.num_errors += len(numbers)
        self._add([(number, None, error) for number in numbers])

    def write_to(self, target: str) -> None:
        """Make the temporary table of the rows' fields, their answers and errors."""
        self._insert()
        names = ", ".join(map(quoted, self._rows.fields))
        self._connection.execute(
            f"CREATE TEMP TABLE {quoted(target)} AS SELECT {names}, answer, error "
            f"FROM {self._rows.name} JOIN {self._name} ON relay_number = number "
            f"ORDER BY relay_number"
        )

    def drop(self) -> None:
        self._connection.execute(f"DROP TABLE IF EXISTS {self._name}")

    def _add(self, rows: list[tuple[int, AnswerValue | None, str | None]]) -> None:
        self.num_answered += len(rows)
        self._pending += rows
        if len(self._pending) >= _ROWS_PER_INSERT:
            self._insert()

    def _insert(self) -> None:
        if not self._pending:
            return
        columns: list[Any] = [
            pa.array(column, field.type)
            for column, field in zip(zip(*self._pending, strict=True), self._schema, strict=True)
        ]
        self._connection.register("relay_new_answers", pa.table(columns, self._schema))
        self._connection.execute(f"INSERT INTO {self._name} SELECT * FROM relay_new_answers")
        self._connection.unregister("relay_new_answers")
        self._pending.clear()
