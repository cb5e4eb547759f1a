# SPDX-License-Identifier: Apache-2.0
"""The first three kernels of a plan made on the device: who shares which KV blocks.

publish    hashes every prefix of every request and names a leader, the first request, per block
follow     finds how many tokens each request has in common with an earlier one: its parent
group      lists the members of every group; a group belongs to one of its requests

Lengths are counted in *granules*, the shortest run of whole blocks and whole tiles of tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_relay.attention_backends.cuda.kernels.counts import (
    EPOCH,
    NUM_MEMBERS,
    STEP_NUMBERS,
)

ROW_BITS: tl.constexpr = tl.constexpr(20)
LAST_ROW: tl.constexpr = tl.constexpr((1 << 20) - 1)
"""A leader is stored as epoch << ROW_BITS | (LAST_ROW - row), so that the first row of the newest
epoch is the maximum."""


@triton.jit
def _mix(value):
    """A bijection of 64-bit integers that leaves no structure (the finaliser of splitmix64)."""
    value = value.to(tl.uint64)
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return (value ^ (value >> 31)).to(tl.int64)


@triton.jit
def planned_tokens(query_start_loc_ptr, seq_lens_ptr, row, max_query_len):
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
    first, query_len, seq_len = planned_tokens(
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
def is_member(
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
        members = is_member(
            other, is_other, leader, granules, epoch, table_ptr, leaders_ptr, hashes_ptr,
            shareable_ptr, num_blocks, table_stride, hashes_stride, GRANULE_BLOCKS,
        )  # fmt: skip
        first, query_len, _ = planned_tokens(
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
