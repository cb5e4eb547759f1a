# SPDX-License-Identifier: Apache-2.0
"""The distinct rows of a query, in parts that fit into memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import duckdb

from vllm_relay.tables.jobs.job_plan import Bucket
from vllm_relay.tables.ordering.order import OrderChoice
from vllm_relay.tables.question import Question

_FIRST_ROWS = 625
"""Of the first of several buckets: asking begins before larger ones are planned."""


class JobRows:
    """A temporary table of the distinct rows of a source, numbered as they first come in it.

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
        # numbers of single precision as they are written, not as what they are in double precision
        self._exact = [
            f"{column}::VARCHAR::DOUBLE" if str(type) == "FLOAT" else column
            for column, type in zip(self.columns, types, strict=True)
        ]

    def buckets(self, max_rows: int, order: OrderChoice) -> Iterator[Bucket]:
        """The rows, each once.

        Where they are too many for one bucket they are sorted first, by the field that saves most
        when it comes first (Algorithm 1 of Liu et al.), unless the order is "keep".
        """
        if self.num_distinct <= max_rows:
            yield self._bucket(self.name, "true")
            return
        table, place = self.name, "number"
        if order != "keep":
            table, place = self._sorted_name, "place"
            keys = ", ".join(self._columns_by_savings())
            self._connection.execute(
                f"CREATE TEMP TABLE {table} AS SELECT row_number() OVER (ORDER BY {keys}) - 1 "
                f"AS place, * FROM {self.name}"
            )
        begin, num_rows = 0, min(max_rows, _FIRST_ROWS)
        while begin < self.num_distinct:
            end = begin + num_rows
            yield self._bucket(table, f"{place} >= {begin} AND {place} < {end}")
            begin, num_rows = end, max_rows

    def drop(self) -> None:
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
            f"to_json({exact})::VARCHAR AS {column}"
            for column, exact in zip(self.columns, self._exact, strict=True)
        )
        found = self._connection.sql(
            f"SELECT number, num_rows, {values} FROM {table} WHERE {condition} ORDER BY number"
        ).to_arrow_table()
        return Bucket(
            found["number"].to_pylist(), found["num_rows"].to_pylist(), found.select(self.columns)
        )

    def _one(self, query: str) -> Any:
        return self._connection.execute(query).fetchall()[0]
