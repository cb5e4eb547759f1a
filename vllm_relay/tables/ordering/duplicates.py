# SPDX-License-Identifier: Apache-2.0
"""Rows that become the same prompt, and fields that determine others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_relay.tables.ordering.columns import Column, num_rows


@dataclass(frozen=True)
class DistinctRows:
    """
    Attributes:
        first_rows: the first row of each kind, ascending, int64 [kinds].
        number_of_row: the kind of each row, an index into `first_rows`, int64 [rows].
        counts: rows of each kind, int64 [kinds].
    """

    first_rows: npt.NDArray[np.int64]
    number_of_row: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]


def distinct_rows(fields: Sequence[npt.NDArray[np.integer]]) -> DistinctRows:
    """
    Args:
        fields: those that the prompt uses, at least one: numbers from 0 on, equal for equal values,
            [rows].
    """
    rows = np.zeros(len(fields[0]), np.int64)
    for codes in fields:
        pairs = rows * (int(codes.max(initial=0)) + 1) + codes
        _, first, rows, counts = np.unique(
            pairs, return_index=True, return_inverse=True, return_counts=True
        )
    # kinds in the order of their first rows
    order = np.argsort(first)
    ranks = np.empty_like(order)
    ranks[order] = np.arange(len(order))
    return DistinctRows(first[order], ranks[rows], counts[order])


_SAMPLE_ROWS = 4096


def find_dependencies(columns: Sequence[Column]) -> npt.NDArray[np.bool_]:
    """Which columns determine which: equal values in one mean equal values in the other.

    Exact: a single row that contradicts is enough. A column whose values are all distinct
    determines every column.

    Returns:
        bool [columns, columns]; [a, b]: a determines b. The diagonal is false.
    """
    rows = num_rows(columns)
    determines = np.zeros((len(columns), len(columns)), np.bool_)
    sample = slice(0, _SAMPLE_ROWS)
    for a, source in enumerate(columns):
        some_row = np.zeros(source.num_values, np.int64)
        some_row[source.codes] = np.arange(rows)
        same_value = some_row[source.codes]
        for b, target in enumerate(columns):
            if a == b or (target.num_values > source.num_values):
                continue
            codes = target.codes
            if not np.array_equal(codes[sample], codes[same_value[sample]]):
                continue
            determines[a, b] = np.array_equal(codes, codes[same_value])
    return determines
