# SPDX-License-Identifier: Apache-2.0
"""Chained names of blocks: each tells the whole prefix up to its block, so that two chains which
agree at one depth agree at all smaller ones."""

from __future__ import annotations

from collections.abc import Sequence

BlockName = bytes | tuple[bytes, bytes]
"""A chained block hash; or a hash that is not chained, and a digest of all up to it."""


def common_depth(
    left: Sequence[BlockName], right: Sequence[BlockName], end: int, known: int = 0
) -> int:
    """How many of their first `end` blocks two chains have in common, at least `known`."""
    low, high = known, min(len(left), len(right), end)
    while low < high:
        middle = (low + high + 1) // 2
        if left[middle - 1] == right[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
