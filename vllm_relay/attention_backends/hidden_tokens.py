# SPDX-License-Identifier: Apache-2.0
"""Tokens in KV blocks that nobody attends to: padding, and what other tokens took the place of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

Ranges = tuple[tuple[int, int], ...]
"""Begin and end (exclusive) in tokens; ascending, not empty, without overlap."""


@dataclass(frozen=True)
class HiddenTokens:
    """What the query tokens of some requests of a batch do not see of the tokens before them.

    Attributes:
        ranges: by the request's place in the batch; requests that see everything have no entry.
    """

    ranges: Mapping[int, Ranges]

    def check(self, num_tokens_before: np.ndarray) -> None:
        """Check that these are tokens which stand before the query tokens.

        Args:
            num_tokens_before: int [requests]; how many tokens stand before the query tokens.

        Raises:
            ValueError: what the first inconsistency is.
        """
        for request, ranges in self.ranges.items():
            if not 0 <= request < len(num_tokens_before):
                raise ValueError(
                    f"hidden: request {request} is not one of {len(num_tokens_before)}"
                )
            last_end = 0
            for begin, end in ranges:
                if not last_end <= begin < end <= num_tokens_before[request]:
                    raise ValueError(
                        f"hidden: tokens {begin}..{end} of request {request}, expected ascending "
                        f"ranges among the {num_tokens_before[request]} before its query tokens"
                    )
                last_end = end

    def query_runs(self, query_start_loc: np.ndarray) -> list[tuple[int, int, Ranges]]:
        """First query token, end, and what they hide, of requests that hide something.

        Args:
            query_start_loc: int [requests + 1].
        """
        starts = query_start_loc.tolist()
        return [(starts[each], starts[each + 1], hidden) for each, hidden in self.ranges.items()]

    def visible_pieces(self, request: int, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """The parts of tokens begin..end that are not hidden, in order."""
        for hidden_begin, hidden_end in self.ranges.get(request, ()):
            if hidden_begin >= end:
                break
            if begin < hidden_begin:
                yield begin, hidden_begin
            begin = max(begin, hidden_end)
        if begin < end:
            yield begin, end

    def count(self, request: int, begin: int = 0, end: int | None = None) -> int:
        """How many tokens of begin..end are hidden."""
        total = 0
        for hidden_begin, hidden_end in self.ranges.get(request, ()):
            until = hidden_end if end is None else min(hidden_end, end)
            total += max(until - max(hidden_begin, begin), 0)
        return total

    def visible_block_ids(self, block_table: np.ndarray, block_size: int) -> np.ndarray:
        """The block table with ids that are equal where the same tokens of the same block are
        seen: blocks with hidden tokens get ids of their own.

        Args:
            block_table: int32 [requests, blocks].

        Returns:
            int32 [requests, blocks].
        """
        ids = block_table.copy()
        next_id = int(block_table.max(initial=0)) + 1
        ids_of_parts: dict[tuple[int, Ranges], int] = {}
        for request, ranges in self.ranges.items():
            for block, hidden in _by_block(ranges, block_size, block_table.shape[1]).items():
                key = (int(block_table[request, block]), hidden)
                ids[request, block] = ids_of_parts.setdefault(key, next_id + len(ids_of_parts))
        return ids


def _by_block(ranges: Ranges, block_size: int, num_blocks: int) -> dict[int, Ranges]:
    """Block -> the ranges within it, counted from its first token."""
    parts: dict[int, Ranges] = {}
    for begin, end in ranges:
        for block in range(begin // block_size, min(-(-end // block_size), num_blocks)):
            first = block * block_size
            part = (max(begin - first, 0), min(end - first, block_size))
            parts[block] = (*parts.get(block, ()), part)
    return parts
