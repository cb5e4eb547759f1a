# SPDX-License-Identifier: Apache-2.0
"""The distinct rows of a DuckDB query, in parts that fit into memory, and their answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import duckdb
import pyarrow as pa

from vllm_relay.tables.identifiers import ANSWER, ERROR, json_text, quoted
from vllm_relay.tables.jobs.answers import ARROW_TYPES, Answer
from vllm_relay.tables.jobs.job_plan import Bucket, bucket_bounds
from vllm_relay.tables.ordering.order import OrderChoice
from vllm_relay.tables.outputs import AnswerValue, Output
from vllm_relay.tables.question import Question

_ROWS_PER_INSERT = 4096


class JobRows:
    """`SourceRows` of a source: a temporary table, numbered as they first come in it.

    Args:
        connection: to DuckDB.
        source: a query whose columns are the question's fields.
        question: about these.

    Attributes:
        fields: names of the question's fields.
        name: of the table, with the columns ``number``, ``num_rows`` and `columns`.
        columns: of the fields. Fields may have any names, those of other columns too.
        num_distinct: rows of the table.
        num_rows: of the source.

    Raises:
        ValueError: the source has other columns.
    """

    _tables = count()

    def __init__(
        self, connection: duckdb.DuckDBPyConnection, source: str, question: Question
    ) -> None:
        self._connection = connection
        self.fields = question.fields
        self.name = f"relay_rows_{next(self._tables)}"
        self.columns = [f"field_{i}" for i in range(len(self.fields))]
        self._sorted_name = f"{self.name}_sorted"
        found = connection.sql(source).columns
        if tuple(found) != tuple(self.fields):
            raise ValueError(
                f"a query with columns {found} given, expected the fields of the question: "
                f"{list(self.fields)}"
            )
        columns = ", ".join(self.columns)
        # rows are equal if they are shown alike, whatever their collation says
        shown = ", ".join(f"to_json({column})" for column in self.columns)
        # A comment may end the source. Joined by place: values that aggregates keep, as arg_min
        # does, cannot be spilled to disk.
        connection.execute(
            f"CREATE TEMP TABLE {self.name} AS WITH placed AS MATERIALIZED "
            f"(SELECT *, row_number() OVER () AS place FROM (\n{source}\n) AS source({columns})) "
            f"SELECT row_number() OVER (ORDER BY place) - 1 AS number, num_rows, {columns} "
            f"FROM placed JOIN (SELECT min(place) AS first_place, count(*) AS num_rows "
            f"FROM placed GROUP BY {shown}) ON place = first_place"
        )
        self.num_distinct, self.num_rows = self._one(
            f"SELECT count(*), coalesce(sum(num_rows), 0)::BIGINT FROM {self.name}"
        )

        types = connection.sql(f"SELECT {columns} FROM {self.name}").types
        self._types = dict(zip(self.columns, types, strict=True))

    def buckets(self, max_rows: int, order: OrderChoice) -> Iterator[Bucket]:
        """See `SourceRows`."""
        table, place = self.name, "number"
        bounds = list(bucket_bounds(self.num_distinct, max_rows))
        if len(bounds) > 1 and order != "keep":
            table, place = self._sorted_name, "place"
            keys = ", ".join(self._columns_by_savings())
            self._connection.execute(
                f"CREATE TEMP TABLE {table} AS SELECT row_number() OVER (ORDER BY {keys}) - 1 "
                f"AS place, * FROM {self.name}"
            )
        for begin, end in bounds:
            yield self._bucket(table, f"{place} >= {begin} AND {place} < {end}")

    def close(self) -> None:
        """Drop the tables."""
        for table in (self._sorted_name, self.name):
            self._connection.execute(f"DROP TABLE IF EXISTS {table}")

    def _columns_by_savings(self) -> Sequence[str]:
        scores = ", ".join(
            f"avg(length({column}::VARCHAR)) / greatest(approx_count_distinct({column}), 1)"
            for column in self.columns
        )
        found = dict(zip(self.columns, self._one(f"SELECT {scores} FROM {self.name}"), strict=True))
        return sorted(self.columns, key=lambda column: -(found[column] or 0.0))

    def _bucket(self, table: str, condition: str) -> Bucket:
        values = ", ".join(
            f"{json_text(column, type)} AS {column}" for column, type in self._types.items()
        )
        found = self._connection.sql(
            f"SELECT number, num_rows, {values} FROM {table} WHERE {condition} ORDER BY number"
        ).to_arrow_table()
        return Bucket(
            found["number"].to_pylist(), found["num_rows"].to_pylist(), found.select(self.columns)
        )

    def _one(self, query: str) -> Any:
        return self._connection.execute(query).fetchall()[0]


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
            ]
        )
        self._pending: list[tuple[int, AnswerValue | None, str | None]] = []
        self._check_names()
        connection.execute(
            f"CREATE TEMP TABLE {self._name} (number BIGINT, {ANSWER} {output.sql_type}, "
            f"{ERROR} VARCHAR)"
        )

    def add(self, numbers: list[int], answer: Answer) -> None:
        """See `Answers`."""
        self._pending += [(number, answer.value, answer.error) for number in numbers]
        if len(self._pending) >= _ROWS_PER_INSERT:
            self._insert()

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
