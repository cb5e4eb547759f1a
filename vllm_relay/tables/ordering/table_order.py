# SPDX-License-Identifier: Apache-2.0
"""An order of a table's rows and of the fields of each row; the one order of fields for all rows of
Liu et al. 2024, section 3.2, Algorithm 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_relay.tables.ordering.columns import Column, num_rows
from vllm_relay.tables.ordering.sequences import TokenSequences


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
    columns: Sequence[Column],
    order: TableOrder,
    prompts: slice = slice(None),
    before: Sequence[int] = (),
    after: Sequence[int] = (),
) -> TokenSequences:
    """The tokens of the fields of each prompt one after the other.

    Args:
        prompts: which of them; all by default.
        before, after: tokens in front of the fields and behind them.
    """
    rows, fields = order.rows[prompts], order.fields[prompts]
    ends = TokenSequences.from_lists([before, after])
    # one of each line is a column's, or an end
    parts = [(np.s_[:, 0], ends.take(np.zeros(len(rows), np.int64)))]
    parts.append((np.s_[:, -1], ends.take(np.ones(len(rows), np.int64))))
    places = np.pad(fields, ((0, 0), (1, 1)), constant_values=-1)
    parts += [
        (places == number, column.tokens.take(column.codes[rows]))
        for number, column in enumerate(columns)
    ]
    lengths = np.zeros(places.shape, np.int64)
    for at, pieces in parts:
        lengths[at] = pieces.lengths
    begins = (np.cumsum(lengths) - lengths.ravel()).reshape(lengths.shape)
    tokens = np.empty(int(lengths.sum()), np.uint32)
    for at, pieces in parts:
        pieces.copy_to(tokens, begins[at])
    return TokenSequences.back_to_back(tokens, lengths.sum(axis=1))


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
