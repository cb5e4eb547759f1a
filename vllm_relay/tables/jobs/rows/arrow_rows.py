# SPDX-License-Identifier: Apache-2.0
"""The rows of a table in memory, and their answers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from vllm_relay.tables.jobs.answers import ARROW_TYPES, Answer
from vllm_relay.tables.jobs.job_plan import NULL, Bucket, bucket_bounds
from vllm_relay.tables.ordering.duplicates import distinct_rows
from vllm_relay.tables.ordering.order import OrderChoice
from vllm_relay.tables.outputs import Output


class ArrowRows:
    """`SourceRows` of an Arrow table.

    Args:
        table: JSON, as texts, or NULL.

    Attributes:
        num_distinct, num_rows: see `SourceRows`.
        number_of_row: of each row of the table, the number of the distinct row that it is,
            int64 [rows].
    """

    def __init__(self, table: pa.Table) -> None:
        # offsets of 32 bits end at 2 GB
        columns = [each.cast(pa.large_string()).fill_null(NULL) for each in table.columns]
        codes = [_codes(each) for each in columns]
        distinct = distinct_rows(codes)
        self.number_of_row, self._counts = distinct.number_of_row, distinct.counts
        self._rows = pa.table(columns, names=table.column_names).take(distinct.first_rows)
        self.num_distinct = self._rows.num_rows
        self.num_rows = table.num_rows
        savings = [_savings(*each) for each in zip(columns, codes, strict=True)]
        by_savings = np.argsort(-np.array(savings), kind="stable")
        self._sort_keys = [(table.column_names[place], "ascending") for place in by_savings]

    def buckets(self, max_rows: int, order: OrderChoice) -> Iterator[Bucket]:
        """See `SourceRows`."""
        numbers = np.arange(self.num_distinct)
        if self.num_distinct > max_rows and order != "keep":
            numbers = pc.sort_indices(self._rows, self._sort_keys).to_numpy()
        for begin, end in bucket_bounds(self.num_distinct, max_rows):
            chosen = np.sort(numbers[begin:end])
            counts = self._counts[chosen]
            yield Bucket(chosen.tolist(), counts.tolist(), self._rows.take(chosen))


class ArrowAnswers:
    """`Answers` of the rows of a table.

    Args:
        rows: of the table.
        output: what the answers are.
    """

    def __init__(self, rows: ArrowRows, output: Output) -> None:
        self._number_of_row = rows.number_of_row
        self._type = ARROW_TYPES[output.type]
        self._of_distinct: list[Answer | None] = [None] * rows.num_distinct

    def add(self, numbers: list[int], answer: Answer) -> None:
        """See `Answers`."""
        for number in numbers:
            self._of_distinct[number] = answer

    def table(self, error_of_others: str = "") -> pa.Table:
        """The columns ``answer``, ``error`` and ``is_cut`` of each row.

        Args:
            error_of_others: of the rows that have got no answer and no error.
        """
        others = Answer(error=error_of_others)
        answers = [each or others for each in self._of_distinct]
        distinct = pa.table(
            {
                "answer": pa.array([each.value for each in answers], self._type),
                "error": pa.array([each.error for each in answers], pa.string()),
                "is_cut": pa.array([each.is_cut for each in answers], pa.bool_()),
            }
        )
        return distinct.take(self._number_of_row)


def _codes(column: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """Equal numbers for equal values, [rows]."""
    chunks = column.dictionary_encode().chunks
    found = [np.empty(0, np.int64), *(each.indices.to_numpy() for each in chunks)]
    return np.concatenate(found).astype(np.int64)


def _savings(column: pa.ChunkedArray, codes: npt.NDArray[np.int64]) -> float:
    """Bytes that need not be computed again where the column comes first, about."""
    num_bytes = pc.sum(pc.binary_length(column)).as_py() or 0
    return num_bytes / (codes.max(initial=0) + 1)
