# SPDX-License-Identifier: Apache-2.0
"""Planning on the device: from who shares what (`kernels/groups.py`) to the work list.

Nothing is copied to the host and nothing waits, so that vLLM may schedule ahead and replay CUDA
graphs. Five launches for a step, for all layers of a KV cache group (docs/cuda.md, section 4); the
last two are here:

decide     walks each request's groups from the root and keeps those that pay
emit       cuts what was kept, and the rest of each request, into items
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_relay.attention_backends.cuda import plan as gpu_plan
from vllm_relay.attention_backends.cuda.kernels.counts import (
    EPOCH,
    MAX_CHAIN,
    NUM_GROUPS,
    NUM_LARGE,
    NUM_REQUESTS,
    NUM_SHARING,
    NUM_SLOTS,
    NUM_SMALL,
    SECTION_ITEMS,
    SECTION_SLOTS,
    SEGMENT_ITEMS,
    SEGMENT_SLOTS,
    STEP_NUMBERS,
    TOKENS,
    TOKENS_SAVED,
)
from vllm_relay.attention_backends.cuda.kernels.groups import is_member, planned_tokens

ITEM_FIELDS: tl.constexpr = tl.constexpr(gpu_plan.ITEM_FIELDS)
RANGE_FIELDS: tl.constexpr = tl.constexpr(gpu_plan.RANGE_FIELDS)
MAX_DEPTH: tl.constexpr = tl.constexpr(gpu_plan.MAX_DEPTH)
CHAIN_STRIDE: tl.constexpr = tl.constexpr(2 * (gpu_plan.MAX_DEPTH + 1))
STATE: tl.constexpr = tl.constexpr(gpu_plan.MODE_STATE)
TILE_STATES: tl.constexpr = tl.constexpr(gpu_plan.MODE_TILE_STATES)
DIRECT: tl.constexpr = tl.constexpr(gpu_plan.MODE_DIRECT)


@triton.jit
def _num_row_tiles(entries, GROUP: tl.constexpr, SMALL: tl.constexpr, LARGE: tl.constexpr):
    rows = entries * GROUP
    return tl.where(rows > SMALL, tl.cdiv(rows, LARGE), tl.cdiv(rows, SMALL))


@triton.jit
def piece_end(begin, end, folds, SEGMENT: tl.constexpr, SECTION: tl.constexpr):
    """Where the piece that begins at `begin` ends, and whether it is folded as a section:
    `gpu_plan.pieces`."""
    segment_end = tl.minimum(begin // SEGMENT * SEGMENT + SEGMENT, end)
    section_end = tl.minimum(begin + SECTION, end // SEGMENT * SEGMENT)
    is_section = (folds != 0) & (begin % SECTION == 0) & (section_end > begin)
    return tl.where(is_section, section_end, segment_end), is_section


@triton.jit
def _num_pieces_and_slots(
    begin, end, folds, TILE: tl.constexpr, SEGMENT: tl.constexpr, SECTION: tl.constexpr
):
    """How many pieces a range has, and how many slots one of its entries: `gpu_plan.pieces`."""
    end = tl.maximum(begin, end)
    segment_begin = tl.minimum(tl.cdiv(begin, SEGMENT) * SEGMENT, end)
    if begin % SEGMENT == 0:
        segment_begin = begin
    tile_slots = tl.cdiv(segment_begin - begin, TILE)
    num_states = tl.cdiv(end - segment_begin, SEGMENT)
    if folds:
        section_begin = tl.minimum(tl.cdiv(segment_begin, SECTION) * SECTION, end)
        whole_segments_end = end // SEGMENT * SEGMENT
        num_states = tl.cdiv(section_begin - segment_begin, SEGMENT)
        if whole_segments_end > section_begin:
            num_states += tl.cdiv(whole_segments_end - section_begin, SECTION)
            num_states += (end > whole_segments_end).to(tl.int32)
        else:
            num_states += (end > section_begin).to(tl.int32)
    return num_states + (tile_slots > 0).to(tl.int32), num_states + tile_slots


@triton.jit
def _add_to_totals(
    counts_ptr, begin, end, entries, GROUP: tl.constexpr, SMALL: tl.constexpr, LARGE: tl.constexpr,
    TILE: tl.constexpr, SEGMENT: tl.constexpr, SECTION: tl.constexpr,
):  # fmt: skip
    """What a range would take, folded by sections and by segments."""
    tiles = _num_row_tiles(entries, GROUP, SMALL, LARGE)
    pieces, slots = _num_pieces_and_slots(begin, end, True, TILE, SEGMENT, SECTION)
    tl.atomic_add(counts_ptr + SECTION_ITEMS, pieces * tiles, sem="relaxed")
    tl.atomic_add(counts_ptr + SECTION_SLOTS, slots * entries, sem="relaxed")
    pieces, slots = _num_pieces_and_slots(begin, end, False, TILE, SEGMENT, SECTION)
    tl.atomic_add(counts_ptr + SEGMENT_ITEMS, pieces * tiles, sem="relaxed")
    tl.atomic_add(counts_ptr + SEGMENT_SLOTS, slots * entries, sem="relaxed")


@triton.jit
def _private_begin(covered, query_len, seq_len, window, SEGMENT: tl.constexpr):
    """Where the private range of a request begins: behind what it shares, and not long before what
    its first query token sees."""
    seen_from = tl.where(window > 0, tl.maximum(seq_len - query_len + 1 - window, 0), 0)
    return tl.maximum(covered, seen_from // SEGMENT * SEGMENT)


@triton.jit(do_not_specialize=STEP_NUMBERS)
def decide_kernel(
    counts_ptr,
    table_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    leaders_ptr,
    hashes_ptr,
    shareable_ptr,
    parents_ptr,
    shared_ptr,
    group_entries_ptr,
    group_requests_ptr,
    group_children_ptr,
    positions_ptr,
    chain_length_ptr,
    chains_ptr,
    ranges_ptr,
    num_requests,
    num_blocks,
    max_query_len,
    window,
    min_shared_tokens,
    token_cost,
    state_cost,
    start_cost,
    table_stride,
    hashes_stride,
    positions_stride,
    GRANULE_BLOCKS: tl.constexpr,
    GRANULE_TOKENS: tl.constexpr,
    REQUESTS: tl.constexpr,
    GROUP: tl.constexpr,
    SMALL: tl.constexpr,
    LARGE: tl.constexpr,
    TILE: tl.constexpr,
    SEGMENT: tl.constexpr,
    SECTION: tl.constexpr,
):
    """Walks down the groups of request `row`. All members of a group come to the same decision
    about it, for they have the groups above it in common."""
    row = tl.program_id(0)
    epoch = tl.load(counts_ptr + EPOCH).to(tl.int64)
    _, query_len, seq_len = planned_tokens(query_start_loc_ptr, seq_lens_ptr, row, max_query_len)
    group = tl.arange(0, REQUESTS)
    is_group = (group < num_requests) & (query_len > 0)
    is_group = is_group & (tl.load(group_entries_ptr + group, mask=is_group, other=0) > 0)
    granules = tl.load(shared_ptr + group, mask=is_group, other=0)
    leader = tl.load(parents_ptr + group, mask=is_group, other=0)
    rows = tl.zeros((REQUESTS,), tl.int32) + row
    is_mine = is_member(
        rows, is_group, leader, granules, epoch, table_ptr, leaders_ptr, hashes_ptr,
        shareable_ptr, num_blocks, table_stride, hashes_stride, GRANULE_BLOCKS,
    )  # fmt: skip

    none: tl.constexpr = 2147483647
    ends = tl.where(is_mine, granules, none)
    covered = 0
    length = 0
    own_begin = -1
    next_end = tl.min(ends, 0)
    while next_end < none:
        index = tl.min(tl.where(ends == next_end, group, REQUESTS), 0)
        entries = tl.load(group_entries_ptr + index)
        children = tl.load(group_children_ptr + index)
        tokens = (next_end - covered) * GRANULE_TOKENS
        end = next_end * GRANULE_TOKENS
        # reading the range once instead of once per child, against the states it leaves: its own,
        # and one for each tile that is left of the segment in which it ends
        states = 1 + tl.where(end % SEGMENT == 0, 0, tl.cdiv(SEGMENT - end % SEGMENT, TILE))
        saved = (children - 1).to(tl.float32) * tokens.to(tl.float32) * token_cost
        spent = (entries * GROUP * states).to(tl.float32) * state_cost + start_cost
        pays = (saved >= spent) & (end >= min_shared_tokens) & (length < MAX_DEPTH)
        if pays:
            position = tl.load(positions_ptr + index * positions_stride + row)
            tl.store(chains_ptr + row * CHAIN_STRIDE + 2 * length, index)
            tl.store(chains_ptr + row * CHAIN_STRIDE + 2 * length + 1, position)
            if index == row:  # the owner of a group is a member of it
                own_begin = covered * GRANULE_TOKENS
                tl.store(ranges_ptr + row * RANGE_FIELDS + 1, end)
                _add_to_totals(
                    counts_ptr, own_begin, end, entries, GROUP, SMALL, LARGE, TILE, SEGMENT,
                    SECTION,
                )  # fmt: skip
                requests = tl.load(group_requests_ptr + row)
                tl.atomic_add(counts_ptr + NUM_GROUPS, 1, sem="relaxed")
                tl.atomic_add(counts_ptr + TOKENS_SAVED, (requests - 1) * tokens, sem="relaxed")
            covered = next_end
            length += 1
        ends = tl.where(ends == next_end, none, ends)
        next_end = tl.min(ends, 0)
    tl.store(ranges_ptr + row * RANGE_FIELDS, own_begin)

    private = num_requests + row
    begin = _private_begin(covered * GRANULE_TOKENS, query_len, seq_len, window, SEGMENT)
    tl.store(ranges_ptr + private * RANGE_FIELDS, begin)
    tl.store(ranges_ptr + private * RANGE_FIELDS + 1, seq_len)
    tl.store(chains_ptr + row * CHAIN_STRIDE + 2 * length, private)
    tl.store(chains_ptr + row * CHAIN_STRIDE + 2 * length + 1, 0)
    tl.store(chain_length_ptr + row, length + 1)
    if query_len > 0:
        _add_to_totals(
            counts_ptr, begin, seq_len, query_len, GROUP, SMALL, LARGE, TILE, SEGMENT, SECTION
        )
        tl.atomic_add(counts_ptr + NUM_REQUESTS, 1, sem="relaxed")
        tl.atomic_add(counts_ptr + NUM_SHARING, (length > 0).to(tl.int32), sem="relaxed")
        tl.atomic_max(counts_ptr + MAX_CHAIN, length, sem="relaxed")
        tl.atomic_add(counts_ptr + TOKENS, seq_len, sem="relaxed")


@triton.jit
def _add_step_to_totals(counts_ptr, totals_ptr, shares):
    tl.atomic_add(totals_ptr, 1, sem="relaxed")
    tl.atomic_add(totals_ptr + 1, tl.load(counts_ptr + NUM_REQUESTS).to(tl.int64), sem="relaxed")
    sharing = tl.where(shares, tl.load(counts_ptr + NUM_SHARING), 0).to(tl.int64)
    saved = tl.where(shares, tl.load(counts_ptr + TOKENS_SAVED), 0).to(tl.int64)
    tl.atomic_add(totals_ptr + 2, sharing, sem="relaxed")
    tl.atomic_add(totals_ptr + 3, tl.load(counts_ptr + TOKENS).to(tl.int64), sem="relaxed")
    tl.atomic_add(totals_ptr + 4, saved, sem="relaxed")
    groups = tl.where(shares, tl.load(counts_ptr + NUM_GROUPS), 0).to(tl.int64)
    depth = tl.where(shares, tl.load(counts_ptr + MAX_CHAIN), 0).to(tl.int64)
    tl.store(totals_ptr + 5, groups)
    tl.store(totals_ptr + 6, depth)


@triton.jit(do_not_specialize=STEP_NUMBERS)
def emit_kernel(
    counts_ptr,
    totals_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    parents_ptr,
    group_first_ptr,
    group_entries_ptr,
    chain_length_ptr,
    chains_ptr,
    ranges_ptr,
    token_request_ptr,
    large_items_ptr,
    small_items_ptr,
    num_requests,
    max_query_len,
    window,
    max_items,
    max_slots,
    num_kv_heads,
    num_programs,
    is_counted,
    GROUP: tl.constexpr,
    SMALL: tl.constexpr,
    LARGE: tl.constexpr,
    TILE: tl.constexpr,
    SEGMENT: tl.constexpr,
    SECTION: tl.constexpr,
    LANES: tl.constexpr,
):
    """The items of one range: program r < num_requests emits the group that request r owns, program
    num_requests + r what r reads alone."""
    index = tl.program_id(0)
    if index == 0:
        tl.atomic_add(counts_ptr + EPOCH, 1, sem="relaxed")  # nobody reads it any more
    # where nothing is shared, sections always fit
    shares = (tl.load(counts_ptr + SECTION_ITEMS) <= max_items) & (
        tl.load(counts_ptr + SECTION_SLOTS) <= max_slots
    )
    if (index == 0) & (is_counted != 0):
        _add_step_to_totals(counts_ptr, totals_ptr, shares)
    # whole sections leave fewer states; where they would leave a quarter of the programs idle in
    # the last round, segments spread better
    work = tl.load(counts_ptr + SECTION_ITEMS) * num_kv_heads
    folds = (
        (~shares)
        | (work * 4 >= tl.cdiv(work, num_programs) * num_programs * 3)
        | (tl.load(counts_ptr + SEGMENT_ITEMS) > max_items)
        | (tl.load(counts_ptr + SEGMENT_SLOTS) > max_slots)
    )
    range_ptr = ranges_ptr + index * RANGE_FIELDS
    begin = tl.load(range_ptr)
    end = tl.load(range_ptr + 1)
    direct = False
    if index < num_requests:
        table_row = tl.load(parents_ptr + index)
        members_first = tl.load(group_first_ptr + index)
        entries = tl.where(shares & (begin >= 0), tl.load(group_entries_ptr + index), 0)
    else:
        table_row = index - num_requests
        members_first, entries, seq_len = planned_tokens(
            query_start_loc_ptr, seq_lens_ptr, table_row, max_query_len
        )
        length = tl.load(chain_length_ptr + table_row)
        if ~shares:
            begin = _private_begin(0, entries, seq_len, window, SEGMENT)
            length = 1
            tl.store(range_ptr, begin)
            tl.store(chain_length_ptr + table_row, 1)
            tl.store(chains_ptr + table_row * CHAIN_STRIDE, index)
            tl.store(chains_ptr + table_row * CHAIN_STRIDE + 1, 0)
        direct = (length == 1) & (end - begin <= SEGMENT)
        if direct:
            for first in range(members_first, members_first + entries, LANES):
                token = first + tl.arange(0, LANES)
                tl.store(token_request_ptr + token, -1, mask=token < members_first + entries)

    if entries > 0:
        rows = entries * GROUP
        num_tiles = _num_row_tiles(entries, GROUP, SMALL, LARGE)
        tile_rows = tl.where(rows > SMALL, LARGE, SMALL)
        pieces, slots = _num_pieces_and_slots(begin, end, folds, TILE, SEGMENT, SECTION)
        if direct:
            slots = 0
        first_slot = tl.atomic_add(counts_ptr + NUM_SLOTS, entries * slots, sem="relaxed")
        tl.store(range_ptr + 2, first_slot)
        tl.store(range_ptr + 3, slots)
        tl.store(range_ptr + 4, folds.to(tl.int32))
        if rows > SMALL:
            items_ptr = large_items_ptr
            first_item = tl.atomic_add(counts_ptr + NUM_LARGE, pieces * num_tiles, sem="relaxed")
        else:
            items_ptr = small_items_ptr
            first_item = tl.atomic_add(counts_ptr + NUM_SMALL, pieces * num_tiles, sem="relaxed")
        slot = first_slot
        while begin < end:
            next_begin, _ = piece_end(begin, end, folds, SEGMENT, SECTION)
            mode = STATE
            piece_slots = 1
            if begin % SEGMENT != 0:
                mode = TILE_STATES
                piece_slots = tl.cdiv(next_begin - begin, TILE)
            if direct:
                mode = DIRECT
            for first_tile in range(0, num_tiles, LANES):
                tile = first_tile + tl.arange(0, LANES)
                is_tile = tile < num_tiles
                item_ptr = items_ptr + (first_item + tile) * ITEM_FIELDS
                tl.store(item_ptr, table_row, mask=is_tile)
                tl.store(item_ptr + 1, members_first, mask=is_tile)
                tl.store(item_ptr + 2, tile * tile_rows, mask=is_tile)
                tl.store(item_ptr + 3, rows, mask=is_tile)
                tl.store(item_ptr + 4, begin, mask=is_tile)
                tl.store(item_ptr + 5, next_begin, mask=is_tile)
                tl.store(item_ptr + 6, slot, mask=is_tile)
                tl.store(item_ptr + 7, slots, mask=is_tile)
                tl.store(item_ptr + 8, mode, mask=is_tile)
            first_item += num_tiles
            slot += piece_slots
            begin = next_begin
