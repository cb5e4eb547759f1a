# SPDX-License-Identifier: Apache-2.0
"""Runs of different lengths, one behind the other in one array."""

import numpy as np


def starts(counts: np.ndarray) -> np.ndarray:
    """int64, or float64, [counts + 1]: where each run begins, and what all are."""
    sums = np.zeros(len(counts) + 1, np.result_type(counts, np.int64))
    counts.cumsum(out=sums[1:])
    return sums


def repeated(counts: np.ndarray, first: np.ndarray | int = 0) -> tuple[np.ndarray, np.ndarray]:
    """int64 [sum of counts], twice: each index as often as it counts, and the how manieth of its
    kind each is, counted from `first`."""
    index = np.arange(len(counts)).repeat(counts)
    return index, np.arange(len(index)) + (first - counts.cumsum() + counts)[index]
