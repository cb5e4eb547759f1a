# SPDX-License-Identifier: Apache-2.0
"""Groups of rows with an equal beginning, split by one more field."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_relay.tables.ordering.columns import Column

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Children:
    """What groups become when the rows of each are told apart by one column.

    Attributes:
        parents: group of each child, ascending, int64 [children].
        codes: its value, ascending within a parent, int64 [children].
        counts: its rows, int64 [children].
        of_rows: child of each row, int64 [rows]; empty unless asked for.
    """

    parents: Int64
    codes: Int64
    counts: Int64
    of_rows: Int64


def split(
    groups: npt.NDArray[np.integer],
    num_groups: int,
    codes: npt.NDArray[np.int32],
    num_values: int,
    with_rows: bool = False,
) -> Children:
    """
    Args:
        groups: of each row, below `num_groups`, [rows].
        codes: of each row, below `num_values`, int32 [rows].
        with_rows: find the child of each row too.
    """
    keys = groups.astype(np.int64) * num_values + codes
    of_rows = np.empty(0, np.int64)
    if num_groups * num_values <= 4 * len(keys) + 1024:
        all_counts = np.bincount(keys, minlength=num_groups * num_values)
        distinct = np.flatnonzero(all_counts)
        counts = all_counts[distinct]
        if with_rows:
            numbers = np.empty(len(all_counts), np.int64)
            numbers[distinct] = np.arange(len(distinct))
            of_rows = numbers[keys]
    else:
        order = np.argsort(keys) if with_rows else None
        ordered = np.sort(keys) if order is None else keys[order]
        begins = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
        distinct = ordered[begins]
        counts = np.diff(begins, append=len(ordered))
        if order is not None:
            of_rows = np.empty(len(keys), np.int64)
            of_rows[order] = np.repeat(np.arange(len(begins)), counts)
    parents = distinct // num_values
    return Children(parents, distinct - parents * num_values, counts, of_rows)


def neighbor_tokens(
    column: Column, parents: Int64, codes: Int64, num_groups: int
) -> npt.NDArray[np.float64]:
    """Tokens that children share with the one before them in the same parent, summed by parent.

    Args:
        parents, codes: of children, as in `Children`.

    Returns:
        float64 [groups].
    """
    pairs = np.flatnonzero(parents[1:] == parents[:-1])
    shared = column.shared_lengths(codes[pairs], codes[pairs + 1])
    return np.bincount(parents[pairs], shared, num_groups).astype(np.float64)


def saved_tokens(
    column: Column, lengths: Int64, children: Children, num_groups: int
) -> npt.NDArray[np.float64]:
    """Tokens that need not be computed if this column comes next, by group.

    Every child computes its field once, and of that only what its neighbor does not share.

    Args:
        lengths: tokens by value of the column, int64 [distinct values].

    Returns:
        float64 [groups].
    """
    whole = np.bincount(
        children.parents,
        weights=(children.counts - 1) * lengths[children.codes],
        minlength=num_groups,
    )
    return whole + neighbor_tokens(column, children.parents, children.codes, num_groups)
