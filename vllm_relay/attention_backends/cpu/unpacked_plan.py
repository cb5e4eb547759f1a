# SPDX-License-Identifier: Apache-2.0
"""The work list of attention over tokens that are in no KV cache: who folds which segments.

Pure: numpy in, numpy out. A thread packs a segment for the rows of its item; the plan never changes
what is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_relay.attention_backends.cpu.work_items import ITEMS_PER_THREAD, SEGMENT_TOKENS
from vllm_relay.attention_backends.plan import MAX_BLOCK_ROWS

MIN_PACKED_ROWS = 512
"""Fewer rows of an item are not worth packing a segment once more, as far as segments can be
divided among threads instead."""
MAX_PARTIAL_ROWS = 1 << 18
"""Rows of all KV heads whose states, one a segment, wait in memory to be merged."""
MAX_ITEM_ROWS = 2048
"""Rows of one kv head whose states a thread keeps while it reads all segments."""


@dataclass(frozen=True)
class UnpackedPlan:
    """Arrays of int32 as `csrc/attention/unpacked.h` lays them out."""

    blocks: np.ndarray
    """[blocks, 4]: request, first and last query token, rows of one kv head before it."""
    items: np.ndarray
    """[items, 4]: first and last block, first and last segment."""
    max_item_rows: int
    num_segments: int
    splits_segments: bool


def plan_unpacked(
    num_queries: Sequence[int],
    begins: Sequence[int],
    ends: Sequence[int],
    *,
    group_size: int,
    num_kv_heads: int,
    num_threads: int,
) -> UnpackedPlan:
    """Plans one call.

    Args:
        num_queries: query tokens of each request, at least one.
        begins, ends: the tokens of its sequence that it reads.
        group_size: query heads of a kv head.
    """
    max_entries = max(1, MAX_BLOCK_ROWS // group_size)
    blocks, first_row = [], 0
    for request, queries in enumerate(num_queries):
        parts = -(-queries // max_entries)
        for part in range(parts):
            first, last = part * queries // parts, (part + 1) * queries // parts
            blocks.append((request, first, last, first_row))
            first_row += (last - first) * group_size
    first_segment = min(begins) // SEGMENT_TOKENS
    num_segments = max(first_segment, -(-max(ends) // SEGMENT_TOKENS))
    segments = num_segments - first_segment

    wanted = 1 if num_threads == 1 else -(-num_threads * ITEMS_PER_THREAD // num_kv_heads)
    keeps_states = first_row * num_kv_heads * num_segments <= MAX_PARTIAL_ROWS
    fewest = -(-first_row // MAX_ITEM_ROWS)
    most = max(1, first_row // MIN_PACKED_ROWS) if keeps_states else len(blocks)
    parts = min(max(fewest, min(wanted, most)), len(blocks))
    divisions = min(-(-wanted // parts), max(1, segments)) if keeps_states else 1

    cuts = np.arange(parts + 1) * len(blocks) // parts
    shares = first_segment + np.arange(divisions + 1) * segments // divisions
    items = [
        (cuts[part], cuts[part + 1], shares[division], shares[division + 1])
        for part in range(parts)
        for division in range(divisions)
    ]
    rows = np.append([block[3] for block in blocks], first_row)
    return UnpackedPlan(
        blocks=np.array(blocks, np.int32),
        items=np.array(items, np.int32),
        max_item_rows=int(np.diff(rows[cuts]).max()),
        num_segments=num_segments,
        splits_segments=bool(divisions > 1),
    )
