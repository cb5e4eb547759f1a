# SPDX-License-Identifier: Apache-2.0
"""An order of a table's rows and of the fields of each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_relay.tables.ordering.columns import Column, num_rows
from vllm_relay.tables.ordering.sequences import TokenSequences, gather_indices


@dataclass(frozen=True)
class TableOrder:
    """
    Attributes:
        rows: the caller's row of each prompt, int64 [rows]: a permutation.
        fields: the columns of each prompt in their order, int16 [rows, columns]: each line a
            permutation.
    """

    rows: npt.NDArray[np.int64]
    fields: npt.NDArray[np.int16]


def kept_order(columns: Sequence[Column]) -> TableOrder:
    """Rows and fields as they are."""
    rows = num_rows(columns)
    fields = np.broadcast_to(np.arange(len(columns), dtype=np.int16), (rows, len(columns)))
    return TableOrder(np.arange(rows), fields)


def sort_rows(columns: Sequence[Column], fields: npt.NDArray[np.int16]) -> TableOrder:
    """Rows with equal beginnings together: sorted by their first field, then by their second...

    Args:
        fields: the columns of each of the caller's rows in their order, int16 [rows, columns].
    """
    rows = num_rows(columns)
    begins = np.concatenate([[0], np.cumsum([column.num_values for column in columns])])
    cells = np.stack([column.codes + begin for column, begin in zip(columns, begins, strict=False)])
    every_row = np.arange(rows)
    keys = [cells[fields[:, slot], every_row] for slot in range(len(columns))]
    order = np.lexsort(keys[::-1])
    return TableOrder(order, fields[order])


def compose(
    columns: Sequence[Column], order: TableOrder, prompts: slice = slice(None)
) -> TokenSequences:
    """The tokens of the fields of each prompt one after the other.

    Args:
        prompts: which of them; all by default.
    """
    rows, fields = order.rows[prompts], order.fields[prompts]
    if len(rows) == 0:
        return TokenSequences(np.empty(0, np.uint32), np.zeros(1, np.int64))
    begins = np.empty(fields.shape, np.int64)
    lengths = np.empty(fields.shape, np.int64)
    pool_begin = 0
    for number, column in enumerate(columns):
        at = fields == number
        codes = column.codes[rows]
        # one of each line is this column's
        begins[at] = pool_begin + column.tokens.offsets[codes]
        lengths[at] = column.lengths[codes]
        pool_begin += len(column.tokens.tokens)
    pool = np.concatenate([column.tokens.tokens for column in columns])
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(lengths.sum(axis=1), out=offsets[1:])
    return TokenSequences(pool[gather_indices(begins.ravel(), lengths.ravel())], offsets)
