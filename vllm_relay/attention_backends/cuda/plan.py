# SPDX-License-Identifier: Apache-2.0
"""The work list of one step for the Triton kernels: what it looks like, and how a forest becomes
one. `kernels/plan.py` makes the same lists on the device.

A *range* is what one group of requests reads together, or the rest of one request. It is cut into
*pieces* at fixed token positions, and its rows into tiles of rows; a piece of a tile is an *item*,
the unit of work. States wait in *slots*, one for each query token (an entry of the range) and head.

Pure: numpy in, numpy out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from vllm_relay.attention_backends.cuda.config import KernelConfig
from vllm_relay.attention_backends.forest import Forest

ITEM_FIELDS = 9
"""Block table row; where the range's entries begin in `members`; first row of the tile and number
of rows of the range; begin and end token; slot of the range's first entry; slots per entry; mode.
"""

MODE_STATE = 0
"""One state of all the tokens, segment folded onto segment."""
MODE_TILE_STATES = 1
"""One state per tile of tokens: for pieces that begin inside of a segment."""
MODE_DIRECT = 2
"""The rows see nothing else: the output is written."""

RANGE_FIELDS = 5
"""Begin and end token, slot of the first entry, slots per entry, whether it folds sections."""

NUM_LARGE_ITEMS, NUM_SMALL_ITEMS = 0, 1

MAX_DEPTH = 16
"""Shared ranges per request."""


@dataclass(frozen=True, eq=False)
class GpuPlan:
    """All int32. Rows of a range are its entries, each with the query heads of one kv head."""

    large_items: np.ndarray
    """[items, ITEM_FIELDS]: those with more rows than the kernel's small tile has."""
    small_items: np.ndarray
    """[items, ITEM_FIELDS]"""
    members: np.ndarray
    """Query tokens, range by range; begins with 0, 1, 2, ..., the private ranges."""
    visible: np.ndarray
    """[query tokens]: KV tokens each sees, up to and with its own."""
    token_request: np.ndarray
    """[query tokens]: whose states are to be merged; -1 for others."""
    token_entry: np.ndarray
    """[query tokens]: which of its request's query tokens each is."""
    chain_length: np.ndarray
    """[requests]: ranges that a request reads."""
    chains: np.ndarray
    """[requests, MAX_DEPTH + 1, 2]: those ranges in token order, and which of the range's entries
    is the request's first."""
    ranges: np.ndarray
    """[ranges, RANGE_FIELDS]"""
    num_slots: int


def pieces(
    begin: int, end: int, config: KernelConfig, folds: bool
) -> Iterator[tuple[int, int, int, int]]:
    """The pieces of a range: begin, end, mode and number of slots of each.

    States are merged tile by tile into those of segments, segment by segment into those of
    sections, and these into the result. A program may therefore fold only from the beginning of a
    segment, or of a section; what is left of a segment, or of a section, waits for the merge.
    """
    tile, segment, section = config.tile_tokens, config.segment_tokens, config.section_tokens
    while begin < end:
        segment_end = min(end, begin // segment * segment + segment)
        if begin % segment:
            yield begin, segment_end, MODE_TILE_STATES, -(-(segment_end - begin) // tile)
            begin = segment_end
            continue
        whole_segments_end = min(begin + section, end // segment * segment)
        if folds and begin % section == 0 and whole_segments_end > begin:
            segment_end = whole_segments_end
        yield begin, segment_end, MODE_STATE, 1
        begin = segment_end


def plan_forest(
    forest: Forest,
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray,
    *,
    config: KernelConfig,
    group_size: int,
    folds: bool,
    window_tokens: int = 0,
) -> GpuPlan:
    """The work list for a given forest.

    Args:
        forest: who shares what; ends of ranges are rounded down to whole tiles.
        query_start_loc: int32 [requests + 1].
        seq_lens: int32 [requests].
        group_size: query heads per kv head.
        folds: one program per section, else one per segment.
        window_tokens: that every layer sees at most, 0 for all.

    Raises:
        ValueError: the forest is deeper than MAX_DEPTH.
    """
    num_requests, num_tokens = len(seq_lens), int(query_start_loc[-1])
    query_lens = np.diff(query_start_loc)
    members = [np.arange(num_tokens)]
    visible = np.zeros(num_tokens, np.int64)
    token_request = np.full(num_tokens, -1)
    token_entry = np.zeros(num_tokens, np.int64)
    for request in range(num_requests):
        own_tokens = slice(query_start_loc[request], query_start_loc[request + 1])
        length = query_lens[request]
        token_entry[own_tokens] = np.arange(length)
        visible[own_tokens] = seq_lens[request] - length + 1 + token_entry[own_tokens]
        token_request[own_tokens] = request

    chains: list[list[tuple[int, int]]] = [[] for _ in range(num_requests)]
    covered = np.zeros(num_requests, np.int64)
    ranges: list[list[int]] = []
    large: list[list[int]] = []
    small: list[list[int]] = []
    num_slots, num_members = 0, num_tokens

    def add(begin: int, end: int, table_row: int, first: int, entries: int, direct: bool) -> None:
        nonlocal num_slots
        rows = entries * group_size
        tile_rows = config.large_rows if rows > config.small_rows else config.small_rows
        items = large if rows > config.small_rows else small
        cut = list(pieces(begin, end, config, folds))
        slots_per_entry = sum(slots for *_, slots in cut)
        slot = num_slots
        ranges.append([begin, end, num_slots, slots_per_entry, int(folds)])
        for piece_begin, piece_end, mode, slots in cut:
            for row in range(0, rows, tile_rows):
                items.append(
                    [table_row, first, row, rows, piece_begin, piece_end, slot, slots_per_entry]
                    + [MODE_DIRECT if direct else mode]
                )
            slot += slots
        num_slots += entries * slots_per_entry

    for first, last, _, end, table_row in forest.nodes.tolist():
        requests = forest.order[first:last]
        begin = int(covered[requests[0]])
        end = end // config.tile_tokens * config.tile_tokens
        if end <= begin:
            continue
        tokens = [np.arange(*query_start_loc[request : request + 2]) for request in requests]
        entry = 0
        for request, its_tokens in zip(requests.tolist(), tokens, strict=True):
            if len(chains[request]) == MAX_DEPTH:
                raise ValueError(f"forest: a request has more than {MAX_DEPTH} shared ranges")
            chains[request].append((len(ranges), entry))
            entry += len(its_tokens)
        covered[requests] = end
        add(begin, end, table_row, num_members, entry, direct=False)
        members += tokens
        num_members += entry
    for request in range(num_requests):
        length = int(query_lens[request])
        if length == 0:
            continue
        begin = int(covered[request])
        end = int(seq_lens[request])
        if window_tokens:
            seen_from = max(0, end - length + 1 - window_tokens)
            begin = max(begin, seen_from // config.segment_tokens * config.segment_tokens)
        cut = list(pieces(begin, end, config, folds))
        direct = (
            not chains[request] and len(cut) == 1 and cut[0][1] - cut[0][0] <= config.segment_tokens
        )
        first = int(query_start_loc[request])
        if direct:
            token_request[first : first + length] = -1
        chains[request].append((len(ranges), 0))
        add(begin, end, request, first, length, direct)

    chain_array = np.zeros((num_requests, MAX_DEPTH + 1, 2), np.int32)
    for request, chain in enumerate(chains):
        chain_array[request, : len(chain)] = np.reshape(chain, (-1, 2))
    return GpuPlan(
        large_items=np.array(large, np.int32).reshape(-1, ITEM_FIELDS),
        small_items=np.array(small, np.int32).reshape(-1, ITEM_FIELDS),
        members=np.concatenate(members).astype(np.int32),
        visible=visible.astype(np.int32),
        token_request=token_request.astype(np.int32),
        token_entry=token_entry.astype(np.int32),
        chain_length=np.array([len(chain) for chain in chains], np.int32),
        chains=chain_array,
        ranges=np.array(ranges, np.int32).reshape(-1, RANGE_FIELDS),
        num_slots=num_slots,
    )
