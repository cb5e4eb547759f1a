# SPDX-License-Identifier: Apache-2.0
"""One order of fields for all rows: Liu et al. 2024, section 3.2, Algorithm 1."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_relay.tables.ordering.columns import Column, num_rows
from vllm_relay.tables.ordering.table_order import TableOrder, sort_rows


def field_scores(columns: Sequence[Column]) -> npt.NDArray[np.float64]:
    """Average tokens x rows / distinct values (section 3.2.2), float64 [columns]."""
    rows = num_rows(columns)
    # the average over rows x rows is their sum
    return np.array(
        [int(c.lengths[c.codes].sum()) / max(c.num_values, 1) if rows else 0.0 for c in columns]
    )


def ranked_fields(columns: Sequence[Column]) -> npt.NDArray[np.int16]:
    """Columns from the highest score down, int16 [columns]; of equals the first comes first."""
    return np.argsort(-field_scores(columns), kind="stable").astype(np.int16)


def fixed_order(columns: Sequence[Column]) -> TableOrder:
    """Fields by their score, and rows in lexicographic order (section 3.3).

    Raises:
        ValueError: there is no column, or columns have different numbers of rows.
    """
    fields = np.broadcast_to(ranked_fields(columns), (num_rows(columns), len(columns)))
    return sort_rows(columns, fields)
