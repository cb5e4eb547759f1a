# SPDX-License-Identifier: Apache-2.0
"""Answers of rows, on their way into DuckDB."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import duckdb
import pyarrow as pa

from vllm_relay.tables.identifiers import ANSWER, ERROR, quoted
from vllm_relay.tables.jobs.job_rows import JobRows
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
        target: the name of the table that `write` makes.

    Attributes:
        num_answered: distinct rows that have an answer or an error.

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
                (ANSWER, _ARROW_TYPES[output.type]),
                (ERROR, pa.string()),
            ]
        )
        self._pending: list[tuple[int, AnswerValue | None, str | None]] = []
        self.num_answered = 0
        self._check_names()
        connection.execute(
            f"CREATE TEMP TABLE {self._name} (number BIGINT, {ANSWER} {output.sql_type}, "
            f"{ERROR} VARCHAR)"
        )

    def add_text(self, numbers: Sequence[int], text: str, is_cut: bool) -> bool:
        """Whether the text is of the type asked for; if not it is an error.

        Args:
            numbers: of the distinct rows.
            text: of the answer.
            is_cut: whether it ended at the engine's `max_answer_tokens`.
        """
        try:
            value = self._output.parse(text)
        except AnswerError as error:
            cut = ": it was cut at the question's max_tokens, give more" if is_cut else ""
            self.add_error(numbers, f"{error}{cut}")
            return False
        self._add([(number, value, None) for number in numbers])
        return True

    def add_error(self, numbers: Sequence[int], error: str) -> None:
        self._add([(number, None, error) for number in numbers])

    def add_error_to_rest(self, error: str) -> None:
        """Of all rows that have no answer and no error."""
        self._insert()
        self._connection.execute(
            f"INSERT INTO {self._name} SELECT number, NULL, ? FROM {self._rows.name} "
            f"WHERE number NOT IN (SELECT number FROM {self._name})",
            [error],
        )

    def write(self) -> None:
        """Make the target: the rows' fields, their answers and errors."""
        self._insert()
        fields = ", ".join(
            f"{column} AS {quoted(name)}"
            for column, name in zip(self._rows.columns, self._rows.fields, strict=True)
        )
        self._connection.execute(
            f"CREATE TEMP TABLE {quoted(self._target)} AS SELECT {fields}, {ANSWER}, {ERROR} "
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
        view = f"{self._name}_new"
        self._connection.register(view, pa.table(columns, self._schema))
        self._connection.execute(f"INSERT INTO {self._name} SELECT * FROM {view}")
        self._connection.unregister(view)
        self._pending.clear()
