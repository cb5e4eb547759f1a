# SPDX-License-Identifier: Apache-2.0
"""Planning on the device: who shares which KV blocks, what pays, and the work list.

Nothing is copied to the host and nothing waits, so that vLLM may schedule ahead and replay CUDA
graphs. Five launches for a step, for all layers of a KV cache group (docs/cuda.md, section 4):

publish    hashes every prefix of every request and names a leader, the first request, per block
follow     finds how many tokens each request has in common with an earlier one: its parent
group      lists the members of every group; a group belongs to one of its requests
decide     walks each request's groups from the root and keeps those that pay
emit       cuts what was kept, and the rest of each request, into items

Lengths are counted in *granules*, the shortest run of whole blocks and whole tiles of tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_relay.attention_backends import gpu_plan

ITEM_FIELDS: tl.constexpr = tl.constexpr(gpu_plan.ITEM_FIELDS)
RANGE_FIELDS: tl.constexpr = tl.constexpr(gpu_plan.RANGE_FIELDS)
MAX_DEPTH: tl.constexpr = tl.constexpr(gpu_plan.MAX_DEPTH)
CHAIN_STRIDE: tl.constexpr = tl.constexpr(2 * (gpu_plan.MAX_DEPTH + 1))
STATE: tl.constexpr = tl.constexpr(gpu_plan.MODE_STATE)
TILE_STATES: tl.constexpr = tl.constexpr(gpu_plan.MODE_TILE_STATES)
DIRECT: tl.constexpr = tl.constexpr(gpu_plan.MODE_DIRECT)

# counts, int32; the first two are those of `PlanTensors`
NUM_LARGE: tl.constexpr = tl.constexpr(gpu_plan.NUM_LARGE_ITEMS)
NUM_SMALL: tl.constexpr = tl.constexpr(gpu_plan.NUM_SMALL_ITEMS)
NUM_MEMBERS: tl.constexpr = tl.constexpr(2)
NUM_SLOTS: tl.constexpr = tl.constexpr(3)
SECTION_ITEMS: tl.constexpr = tl.constexpr(4)
SECTION_SLOTS: tl.constexpr = tl.constexpr(5)
SEGMENT_ITEMS: tl.constexpr = tl.constexpr(6)
SEGMENT_SLOTS: tl.constexpr = tl.constexpr(7)
NUM_REQUESTS: tl.constexpr = tl.constexpr(8)
NUM_SHARING: tl.constexpr = tl.constexpr(9)
NUM_GROUPS: tl.constexpr = tl.constexpr(10)
MAX_CHAIN: tl.constexpr = tl.constexpr(11)
TOKENS: tl.constexpr = tl.constexpr(12)
TOKENS_SAVED: tl.constexpr = tl.constexpr(13)
EPOCH: tl.constexpr = tl.constexpr(14)
"""Not of a step: counts the steps."""
NUM_COUNTS = 16

# totals, int64: summed over all steps, but for the last two
TOTAL_STEPS, TOTAL_REQUESTS, TOTAL_SHARING, TOTAL_TOKENS, TOTAL_TOKENS_SAVED = range(5)
LAST_GROUPS, LAST_DEPTH = 5, 6
NUM_TOTALS = 8

ROW_BITS: tl.constexpr = tl.constexpr(20)
LAST_ROW: tl.constexpr = tl.constexpr((1 << 20) - 1)
"""A leader is stored as epoch << ROW_BITS | (LAST_ROW - row), so that the first row of the newest
epoch is the maximum."""

STEP_NUMBERS = [
    "num_requests", "num_blocks", "max_tokens", "max_members", "max_query_len", "max_items",
    "max_slots", "num_kv_heads", "num_programs", "window", "min_shared_tokens", "table_stride",
    "hashes_stride", "positions_stride", "is_counted",
]  # fmt: skip
"""Arguments for whose values, 1 or multiples of 16, nothing is compiled anew in the middle of
serving."""


@triton.jit
def _mix(value):
    """A bijection of 64-bit integers that leaves no structure (the finaliser of splitmix64)."""
    value = value.to(tl.uint64)
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return (value ^ (value >> 31)).to(tl.int64)


@triton.jit
def _planned_tokens(query_start_loc_ptr, seq_lens_ptr, row, max_query_len):
    """First query token, number of query tokens and KV tokens of a request; nothing of one that
    another kernel serves."""
    first = tl.load(query_start_loc_ptr + row)
    query_len = tl.load(query_start_loc_ptr + row + 1) - first
    seq_len = tl.load(seq_lens_ptr + row)
    planned = (query_len > 0) & (query_len <= max_query_len) & (seq_len >= query_len)
    return first, tl.where(planned, query_len, 0), tl.where(planned, seq_len, 0)


@triton.jit
def _leader(entry, epoch, row):
    """The row that a leader's entry names, or `row` where this step wrote none."""
    named = LAST_ROW - (entry & LAST_ROW)
    return tl.where((entry >> ROW_BITS) == epoch, named, row).to(tl.int32)


@triton.jit(do_not_specialize=STEP_NUMBERS)
def publish_kernel(
    counts_ptr,
    table_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    leaders_ptr,
    hashes_ptr,
    shareable_ptr,
    visible_ptr,
    token_request_ptr,
    token_entry_ptr,
    num_requests,
    num_blocks,
    max_tokens,
    max_query_len,
    table_stride,
    hashes_stride,
    BLOCK_SIZE: tl.constexpr,
    GRANULE_BLOCKS: tl.constexpr,
    CHUNK: tl.constexpr,
    SHARES: tl.constexpr,
):
    row = tl.program_id(0)
    epoch = tl.load(counts_ptr + EPOCH).to(tl.int64)
    if row == 0:
        for index in tl.static_range(EPOCH):
            tl.store(counts_ptr + index, 0)
        # tokens of padded graphs belong to no request
        for begin in range(tl.load(query_start_loc_ptr + num_requests), max_tokens, CHUNK):
            token = begin + tl.arange(0, CHUNK)
            tl.store(token_request_ptr + token, -1, mask=token < max_tokens)
    first, query_len, seq_len = _planned_tokens(
        query_start_loc_ptr, seq_lens_ptr, row, max_query_len
    )
    end = tl.load(query_start_loc_ptr + row + 1)
    for begin in range(first, end, CHUNK):
        token = begin + tl.arange(0, CHUNK)
        is_token = (token < end) & (token < max_tokens)
        tl.store(visible_ptr + token, seq_len - query_len + 1 + token - first, mask=is_token)
        tl.store(token_request_ptr + token, tl.where(query_len > 0, row, -1), mask=is_token)
        tl.store(token_entry_ptr + token, token - first, mask=is_token)

    # the first query token sees these, and the others see more
    shareable = 0
    if SHARES:
        granule_tokens: tl.constexpr = BLOCK_SIZE * GRANULE_BLOCKS
        shareable = tl.where(query_len > 0, (seq_len - query_len + 1) // granule_tokens, 0)
        shareable = tl.minimum(shareable, hashes_stride)
    tl.store(shareable_ptr + row, shareable)
    prefix_hash = tl.zeros((1,), tl.int64)
    for begin in range(0, shareable, CHUNK):
        granule = begin + tl.arange(0, CHUNK)
        is_granule = granule < shareable
        hashed = tl.zeros((CHUNK,), tl.int64)
        has_null = tl.zeros((CHUNK,), tl.int1)
        block = tl.zeros((CHUNK,), tl.int32)
        for index in tl.static_range(GRANULE_BLOCKS):
            column = granule * GRANULE_BLOCKS + index
            block = tl.load(
                table_ptr + row.to(tl.int64) * table_stride + column, mask=is_granule, other=0
            )
            has_null = has_null | (block <= 0) | (block >= num_blocks)
            hashed += _mix((block.to(tl.int64) << 32) | column)
        hashed = tl.where(is_granule, hashed, 0)
        prefix = prefix_hash + tl.cumsum(hashed, 0)
        prefix_hash += tl.sum(hashed, 0)
        tl.store(hashes_ptr + row.to(tl.int64) * hashes_stride + granule, prefix, mask=is_granule)
        entry = (epoch << ROW_BITS) | (LAST_ROW - row)
        present = tl.load(leaders_ptr + block, mask=is_granule & ~has_null, other=entry)
        entries = tl.zeros((CHUNK,), tl.int64) + entry
        tl.atomic_max(leaders_ptr + block, entries, mask=present < entry, sem="relaxed")


@triton.jit(do_not_specialize=STEP_NUMBERS)
def follow_kernel(
    counts_ptr,
    table_ptr,
    leaders_ptr,
    hashes_ptr,
    shareable_ptr,
    parents_ptr,
    shared_ptr,
    num_blocks,
    table_stride,
    hashes_stride,
    GRANULE_BLOCKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """For each request the most granules it shares with an earlier request, and the first of those
    it shares them with."""
    row = tl.program_id(0)
    epoch = tl.load(counts_ptr + EPOCH).to(tl.int64)
    row_hashes = hashes_ptr + row.to(tl.int64) * hashes_stride
    shareable = tl.load(shareable_ptr + row)
    shared = 0
    parent = row
    for begin in range(0, shareable, CHUNK):
        granule = begin + tl.arange(0, CHUNK)
        is_granule = granule < shareable
        column = granule * GRANULE_BLOCKS + GRANULE_BLOCKS - 1
        block = tl.load(
            table_ptr + row.to(tl.int64) * table_stride + column, mask=is_granule, other=0
        )
        is_block = is_granule & (block > 0) & (block < num_blocks)
        entry = tl.load(leaders_ptr + block, mask=is_block, other=0)
        leader = _leader(entry, epoch, row)
        follows = is_block & (leader < row)
        # behind its own granules a row has hashes of steps before
        its_shareable = tl.load(shareable_ptr + leader, mask=follows, other=0)
        follows = follows & (granule < its_shareable)
        its_hash = tl.load(
            hashes_ptr + leader.to(tl.int64) * hashes_stride + granule, mask=follows, other=0
        )
        own_hash = tl.load(row_hashes + granule, mask=follows, other=1)
        follows = follows & (its_hash == own_hash)
        last = tl.max(tl.where(follows, granule + 1, 0), 0)
        if last > 0:
            shared = last
            parent = tl.sum(tl.where(granule + 1 == last, leader, 0), 0)
    tl.store(shared_ptr + row, shared)
    tl.store(parents_ptr + row, parent)


@triton.jit
def _is_member(
    row,
    is_row,
    leader,
    granules,
    epoch,
    table_ptr,
    leaders_ptr,
    hashes_ptr,
    shareable_ptr,
    num_blocks,
    table_stride,
    hashes_stride,
    GRANULE_BLOCKS: tl.constexpr,
):
    """Whether requests begin with the first `granules` granules of request `leader`, the first that
    does; elementwise over `row`, or over `leader` and `granules`."""
    leader, granules = leader + tl.zeros_like(row), granules + tl.zeros_like(row)
    shareable = tl.load(shareable_ptr + row, mask=is_row, other=0)
    is_row = is_row & (granules > 0) & (shareable >= granules)
    column = granules * GRANULE_BLOCKS - 1
    block = tl.load(table_ptr + row.to(tl.int64) * table_stride + column, mask=is_row, other=0)
    is_row = is_row & (block > 0) & (block < num_blocks)
    entry = tl.load(leaders_ptr + block, mask=is_row, other=0)
    is_row = is_row & (_leader(entry, epoch, -1) == leader)
    its_hash = tl.load(
        hashes_ptr + leader.to(tl.int64) * hashes_stride + granules - 1, mask=is_row, other=0
    )
    own_hash = tl.load(
        hashes_ptr + row.to(tl.int64) * hashes_stride + granules - 1, mask=is_row, other=1
    )
    return is_row & (its_hash == own_hash)


@triton.jit(do_not_specialize=STEP_NUMBERS)
def group_kernel(
    counts_ptr,
    table_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    leaders_ptr,
    hashes_ptr,
    shareable_ptr,
    parents_ptr,
    shared_ptr,
    members_ptr,
    group_first_ptr,
    group_entries_ptr,
    group_requests_ptr,
    group_children_ptr,
    positions_ptr,
    num_requests,
    num_blocks,
    max_tokens,
    max_members,
    max_query_len,
    table_stride,
    hashes_stride,
    positions_stride,
    GRANULE_BLOCKS: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """The group that ends where request `row` leaves its parent: all who share as much with it."""
    row = tl.program_id(0)
    epoch = tl.load(counts_ptr + EPOCH).to(tl.int64)
    granules = tl.load(shared_ptr + row)
    leader = tl.load(parents_ptr + row)
    other = tl.arange(0, REQUESTS)
    is_other = other < num_requests
    others_shared = tl.load(shared_ptr + other, mask=is_other, other=0)
    others_parent = tl.load(parents_ptr + other, mask=is_other, other=-1)
    siblings = is_other & (others_parent == leader) & (others_shared == granules)
    # of several requests that leave at the same place the first owns the group
    owns = (granules > 0) & (tl.min(tl.where(siblings, other, REQUESTS), 0) == row)
    num_entries = 0
    if owns:
        members = _is_member(
            other, is_other, leader, granules, epoch, table_ptr, leaders_ptr, hashes_ptr,
            shareable_ptr, num_blocks, table_stride, hashes_stride, GRANULE_BLOCKS,
        )  # fmt: skip
        first, query_len, _ = _planned_tokens(
            query_start_loc_ptr, seq_lens_ptr, tl.where(is_other, other, 0), max_query_len
        )
        entries = tl.where(members, query_len, 0)
        position = tl.cumsum(entries, 0) - entries
        num_entries = tl.sum(entries, 0)
        group_first = tl.atomic_add(counts_ptr + NUM_MEMBERS, num_entries, sem="relaxed")
        if group_first + num_entries > max_members:
            num_entries = 0  # no room: the group is not kept
        else:
            tl.store(group_first_ptr + row, max_tokens + group_first)
            tl.store(group_requests_ptr + row, tl.sum(members.to(tl.int32), 0))
            tl.store(group_children_ptr + row, 1 + tl.sum(siblings.to(tl.int32), 0))
            tl.store(positions_ptr + row * positions_stride + other, position, mask=members)
            for index in range(max_query_len):
                tl.store(
                    members_ptr + max_tokens + group_first + position + index,
                    first + index,
                    mask=members & (index < query_len),
                )
    tl.store(group_entries_ptr + row, num_entries)


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
    _, query_len, seq_len = _planned_tokens(query_start_loc_ptr, seq_lens_ptr, row, max_query_len)
    group = tl.arange(0, REQUESTS)
    is_group = (group < num_requests) & (query_len > 0)
    is_group = is_group & (tl.load(group_entries_ptr + group, mask=is_group, other=0) > 0)
    granules = tl.load(shared_ptr + group, mask=is_group, other=0)
    leader = tl.load(parents_ptr + group, mask=is_group, other=0)
    rows = tl.zeros((REQUESTS,), tl.int32) + row
    is_mine = _is_member(
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
        members_first, entries, seq_len = _planned_tokens(
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
