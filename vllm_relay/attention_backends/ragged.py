# SPDX-License-Identifier: Apache-2.0
"""Runs of different lengths, one behind the other in one array."""

import numpy as np


def repeated(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int64 [sum of counts], twice: each index as often as it counts, and the how manieth of its
    kind each is."""
    index = np.arange(len(counts)).repeat(counts)
    return index, np.arange(len(index)) - (counts.cumsum() - counts)[index]
