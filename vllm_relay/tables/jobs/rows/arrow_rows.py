# SPDX-License-Identifier: Apache-2.0
"""The rows of a table in memory, and their answers."""

from __future__ import annotations

from collections.abc import Iterator

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
        # offsets of 32 bits end at 2 GB; the texts stay where they are
        columns = [each.cast(pa.large_string()) for each in table.columns]
        columns = [each.fill_null(NULL) if each.null_count else each for each in columns]
        codes = [distinct_values(each)[0] for each in columns]
        distinct = distinct_rows(codes)
        self.number_of_row, self._counts = distinct.number_of_row, distinct.counts
        self._first_rows = distinct.first_rows
        self._table = pa.table(columns, names=table.column_names)
        self.num_distinct, self.num_rows = len(self._first_rows), table.num_rows
        savings = [_savings(*each) for each in zip(columns, codes, strict=True)]
        by_savings = np.argsort(-np.array(savings), kind="stable")
        self._sort_keys = [(table.column_names[place], "ascending") for place in by_savings]

    def buckets(self, max_rows: int, order: OrderChoice) -> Iterator[Bucket]:
        """See `SourceRows`."""
        bounds = list(bucket_bounds(self.num_distinct, max_rows))
        numbers = np.arange(self.num_distinct)
        if len(bounds) > 1 and order != "keep":
            rows = pc.sort_indices(self._table, self._sort_keys).to_numpy()
            is_first = np.zeros(self.num_rows, np.bool_)
            is_first[self._first_rows] = True
            numbers = self.number_of_row[rows[is_first[rows]]]
        for begin, end in bounds:
            chosen = np.sort(numbers[begin:end])
            fields = self._table.take(self._first_rows[chosen])
            yield Bucket(chosen.tolist(), self._counts[chosen].tolist(), fields)


class ArrowAnswers:
    """`Answers` of the rows of a table.

    Args:
        rows: of the table.
        output: what the answers are.
    """

    def __init__(self, rows: ArrowRows, output: Output) -> None:
        self._number_of_row = rows.number_of_row
        self._output = output
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
        return answer_table(answers, self._output).take(self._number_of_row)


def _savings(column: pa.ChunkedArray, codes: npt.NDArray[np.int32]) -> float:
    """Bytes that need not be computed again where the column comes first, about."""
    num_bytes = pc.sum(pc.binary_length(column)).as_py() or 0
    return num_bytes / (codes.max(initial=0) + 1)
