# SPDX-License-Identifier: Apache-2.0
"""The distinct rows of a table in memory, and their answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from vllm_relay.tables.jobs.answers import Answer, answer_table
from vllm_relay.tables.jobs.arrow_texts import distinct_values
from vllm_relay.tables.jobs.job_plan import NULL, Bucket, bucket_bounds
from vllm_relay.tables.ordering.duplicates import distinct_rows
from vllm_relay.tables.ordering.order import OrderChoice
from vllm_relay.tables.outputs import Output


class Rows:
    """
    Args:
        table: JSON, as texts, or NULL.
        counts: how often each row is there; None for once.

    Attributes:
        num_distinct: different rows.
        num_rows: of the table, each as often as it is there.
    """

    def __init__(self, table: pa.Table, counts: Sequence[int] | None = None) -> None:
        # offsets of 32 bits end at 2 GB; the texts stay where they are
        columns = [each.cast(pa.large_string()) for each in table.columns]
        columns = [each.fill_null(NULL) if each.null_count else each for each in columns]
        codes = [distinct_values(each)[0] for each in columns]
        distinct = distinct_rows(codes)
        self._number_of_row, self._counts = distinct.number_of_row, distinct.counts
        if counts is not None:
            self._counts = np.zeros(len(distinct.counts), np.int64)
            np.add.at(self._counts, distinct.number_of_row, counts)
        self._first_rows = distinct.first_rows
        self._table = pa.table(columns, names=table.column_names)
        self.num_distinct, self.num_rows = len(self._first_rows), int(self._counts.sum())
        self._answers: list[Answer | None] = [None] * self.num_distinct
        savings = [_savings(*each) for each in zip(columns, codes, strict=True)]
        by_savings = np.argsort(-np.array(savings), kind="stable")
        self._sort_keys = [(table.column_names[place], "ascending") for place in by_savings]

    def buckets(self, max_rows: int, order: OrderChoice) -> Iterator[Bucket]:
        """The different rows, each once.

        Where they are too many for one bucket they are sorted first, by the field that saves most
        when it comes first (Algorithm 1 of Liu et al.), unless the order is "keep".
        """
        bounds = list(bucket_bounds(self.num_distinct, max_rows))
        numbers = np.arange(self.num_distinct)
        if len(bounds) > 1 and order != "keep":
            rows = pc.sort_indices(self._table, self._sort_keys).to_numpy()
            is_first = np.zeros(len(rows), np.bool_)
            is_first[self._first_rows] = True
            numbers = self._number_of_row[rows[is_first[rows]]]
        for begin, end in bounds:
            chosen = np.sort(numbers[begin:end])
            fields = self._table.take(self._first_rows[chosen])
            yield Bucket(chosen.tolist(), self._counts[chosen].tolist(), fields)

    def add(self, numbers: list[int], answer: Answer) -> None:
        """The answer of some of the different rows."""
        for number in numbers:
            self._answers[number] = answer

    def answers(self, error_of_others: str = "") -> list[Answer]:
        """Of each row of the table.

        Args:
            error_of_others: of the rows that have got no answer and no error.
        """
        found = self._of_distinct(error_of_others)
        return [found[number] for number in self._number_of_row.tolist()]

    def table(self, output: Output, error_of_others: str = "") -> pa.Table:
        """The same as columns ``answer``, ``error`` and ``is_cut``."""
        return answer_table(self._of_distinct(error_of_others), output).take(self._number_of_row)

    def _of_distinct(self, error_of_others: str) -> list[Answer]:
        others = Answer(error=error_of_others)
        return [each or others for each in self._answers]


def _savings(column: pa.ChunkedArray, codes: npt.NDArray[np.int32]) -> float:
    """Bytes that need not be computed again where the column comes first, about."""
    num_bytes = pc.sum(pc.binary_length(column)).as_py() or 0
    return num_bytes / (codes.max(initial=0) + 1)
