# SPDX-License-Identifier: Apache-2.0
"""The distinct rows of a query, in parts that fit into memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import duckdb

from vllm_relay.tables.ordering.order import OrderChoice
from vllm_relay.tables.question import Question


def quoted(name: str) -> str:
    """An identifier in SQL."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """A text in SQL."""
    return "'" + text.replace("'", "''") + "'"


@dataclass(frozen=True)
class Bucket:
    """Rows that are ordered together.

    Attributes:
        numbers: of the distinct rows.
        counts: how often the source has each.
        values: JSON of each field's values.
    """

    numbers: list[int]
    counts: list[int]
    values: dict[str, list[str]]


class JobRows:
    """A temporary table of the distinct rows of a source, numbered as they come in it.

    Args:
        connection: to DuckDB.
        source: a query whose columns are the question's fields.
        question: about these.

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
        columns = connection.sql(source).columns
        if tuple(columns) != question.fields:
            raise ValueError(
                f"a query with columns {columns} given, expected the fields of the question: "
                f"{list(question.fields)}"
            )
        names = ", ".join(map(quoted, self.fields))
        connection.execute(
            f"CREATE TEMP TABLE {self.name} AS "
            f"SELECT row_number() OVER (ORDER BY relay_first) - 1 AS relay_number, "
            f"relay_count, {names} FROM "
            f"(SELECT {names}, min(relay_place) AS relay_first, count(*) AS relay_count FROM "
            f"(SELECT *, row_number() OVER () AS relay_place FROM ({source})) GROUP BY {names})"
        )
        self.num_distinct, self.num_rows = self._one(
            f"SELECT count(*), coalesce(sum(relay_count), 0)::BIGINT FROM {self.name}"
        )

    def buckets(self, max_rows: int, order: OrderChoice) -> Iterator[Bucket]:
        """The rows, each once.

        Where they are too many for one bucket they are sorted first, by the field that saves most
        when it comes first (Algorithm 1 of Liu et al.), unless the order is "keep".
        """
        if self.num_distinct <= max_rows:
            yield self._bucket(self.name, "true")
            return
        table, place = self.name, "relay_number"
        if order != "keep":
            table, place = f"{self.name}_sorted", "relay_place"
            keys = ", ".join(map(quoted, self._fields_by_savings()))
            self._connection.execute(
                f"CREATE TEMP TABLE {table} AS SELECT row_number() OVER (ORDER BY {keys}) - 1 "
                f"AS relay_place, * FROM {self.name}"
            )
        for begin in range(0, self.num_distinct, max_rows):
            yield self._bucket(table, f"{place} >= {begin} AND {place} < {begin + max_rows}")
        if table != self.name:
            self._connection.execute(f"DROP TABLE {table}")

    def drop(self) -> None:
        self._connection.execute(f"DROP TABLE IF EXISTS {self.name}")

    def _fields_by_savings(self) -> list[str]:
        scores = ", ".join(
            f"avg(length({quoted(name)}::VARCHAR)) / greatest(approx_count_distinct"
            f"({quoted(name)}), 1)"
            for name in self.fields
        )
        found = self._one(f"SELECT {scores} FROM {self.name}")
        return sorted(self.fields, key=lambda name: -(found[self.fields.index(name)] or 0.0))

    def _bucket(self, table: str, condition: str) -> Bucket:
        values = ", ".join(
            f"coalesce(to_json({quoted(name)})::VARCHAR, 'null')" for name in self.fields
        )
        found = self._connection.execute(
            f"SELECT relay_number, relay_count, {values} FROM {table} WHERE {condition} "
            f"ORDER BY relay_number"
        ).fetchnumpy()
        numbers, counts, *columns = (found[name] for name in found)
        return Bucket(
            numbers.tolist(),
            counts.tolist(),
            {name: column.tolist() for name, column in zip(self.fields, columns, strict=True)},
        )

    def _one(self, query: str) -> Any:
        return self._connection.execute(query).fetchone()
