# SPDX-License-Identifier: Apache-2.0
"""Chained names of blocks: each tells the whole prefix up to its block, so that two chains which
agree at one depth agree at all smaller ones."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

BlockName = bytes | tuple[bytes, bytes]
"""A chained block hash; or a hash that is not chained, and a digest of all up to it."""


def common_depth(
    left: Sequence[BlockName | int], right: Sequence[BlockName | int], end: int, known: int = 0
) -> int:
    """How many of their first `end` blocks two chains have in common, at least `known`."""
    depths = range(min(len(left), len(right), end))
    return bisect_left(depths, True, known, key=lambda depth: left[depth] != right[depth])
