# SPDX-License-Identifier: Apache-2.0
"""Functional dependencies, found in the data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_relay.tables.ordering.columns import Column, num_rows

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
