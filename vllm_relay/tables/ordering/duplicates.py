# SPDX-License-Identifier: Apache-2.0
"""Rows that become the same prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


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
