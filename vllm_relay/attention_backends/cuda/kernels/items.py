# SPDX-License-Identifier: Apache-2.0
"""Parts of the attention kernel that read an item and what it needs before its first tile."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from vllm_relay.attention_backends.cuda.kernels.hidden import (
    NO_TOKEN,
    SEES_ALL,
    load_hidden,
    without_hidden,
)
from vllm_relay.attention_backends.cuda.plans import plan as gpu_plan
from vllm_relay.attention_backends.cuda.plans import plan_cuts

ITEM_FIELDS: tl.constexpr = tl.constexpr(gpu_plan.ITEM_FIELDS)
ENTRY_FIELDS: tl.constexpr = tl.constexpr(gpu_plan.ENTRY_FIELDS)
SEGMENTS: tl.constexpr = tl.constexpr(plan_cuts.MODE_SEGMENTS)
TILES: tl.constexpr = tl.constexpr(plan_cuts.MODE_TILES)


class KernelShape(NamedTuple):
    """What the attention kernel is compiled for, beside the rows of its tiles."""

    GROUP: int
    """Query heads per kv head."""
    NUM_HEADS: int
    HEAD_SIZE: int
    PADDED_HEAD: int
    """The next power of two."""
    BLOCK_SIZE: int
    BLOCK_STRIDE: int
    """Of the KV cache, in elements, as TOKEN_STRIDE."""
    TOKEN_STRIDE: int
    TILE: int
    SEGMENT: int
    HAS_SOFT_CAP: bool
    HAS_ALIBI: bool
    HAS_WINDOW: bool
    HAS_SINKS: bool
    HAS_LSE: bool
    HIDES: bool
    LARGE_STAGES: int | None
    """Of the loop over tiles of 64 rows and more, if others than those of all."""
    PRECISION: str
    """Of products: "ieee" in float32, else "tf32"."""


@triton.jit
def load_item(items_ptr, works_ptr, work, end_work, SHAPE: tl.constexpr):
    """The fields of the item of some work, and its kv head; zeros behind the last one."""
    num_kv_heads: tl.constexpr = SHAPE.NUM_HEADS // SHAPE.GROUP
    exists = work < end_work
    number = tl.load(works_ptr + work, mask=exists, other=0)
    item_ptr = items_ptr + number // num_kv_heads * ITEM_FIELDS
    table_row = tl.load(item_ptr, mask=exists, other=0)
    first_entry = tl.load(item_ptr + 1, mask=exists, other=0)
    row_first = tl.load(item_ptr + 2, mask=exists, other=0)
    num_rows = tl.load(item_ptr + 3, mask=exists, other=0)
    begin = tl.load(item_ptr + 4, mask=exists, other=0)
    end = tl.load(item_ptr + 5, mask=exists, other=0)
    slot = tl.load(item_ptr + 6, mask=exists, other=0)
    mode = tl.load(item_ptr + 7, mask=exists, other=0)
    head = number % num_kv_heads
    return table_row, first_entry, row_first, num_rows, begin, end, slot, mode, head


@triton.jit
def load_rows(entries_ptr, item, inputs, ROWS: tl.constexpr, SHAPE: tl.constexpr):
    """The query token of each row, how many KV tokens it sees, and which bits hide some of them."""
    _, _, _, _, seq_lens_ptr, _, bits_row_ptr, _, _ = inputs
    row = item[2] + tl.arange(0, ROWS)
    is_row = row < item[3]
    entry_ptr = entries_ptr + (item[1] + row // SHAPE.GROUP) * ENTRY_FIELDS
    token = tl.load(entry_ptr, mask=is_row, other=0)
    request = tl.load(entry_ptr + 1, mask=is_row, other=0)
    visible = tl.load(seq_lens_ptr + request, mask=is_row, other=0)
    visible += tl.load(entry_ptr + 2, mask=is_row, other=0)
    bits_row = tl.full((ROWS,), SEES_ALL, tl.int32)
    if SHAPE.HIDES:
        bits_row = tl.load(bits_row_ptr + token, mask=is_row, other=NO_TOKEN)
    return token, visible, bits_row


@triton.jit
def first_tile_of(item, visible, window, ROWS: tl.constexpr, SHAPE: tl.constexpr):
    """Begin and end of the tokens that some row of an item sees, and where its first tile begins:
    that of the first token seen, where there is but one state to write."""
    _, _, row_first, num_rows, begin, end, _, mode, _ = item
    first_token = begin
    if SHAPE.HAS_WINDOW:
        is_row = row_first + tl.arange(0, ROWS) < num_rows
        seen_from = tl.min(tl.where(is_row, visible - window, 2147483647), 0)
        first_token = tl.maximum(begin, seen_from)
    end_token = tl.minimum(end, tl.max(visible, 0))
    # where nobody sees anything of it, the last tile, which is then not read
    first_tile = tl.minimum(first_token, tl.maximum(begin, end - 1)) // SHAPE.TILE * SHAPE.TILE
    first_tile = tl.where((mode == TILES) | (mode == SEGMENTS), begin, first_tile)
    return first_token, end_token, first_tile


@triton.jit
def places_of(tile_begin, SHAPE: tl.constexpr):
    """Of each token of the tile that begins at `tile_begin`: the number of its block, and its place
    in it. What depends on the tile is a scalar, unless a tile is cut by blocks elsewhere than
    others are."""
    TILE: tl.constexpr = SHAPE.TILE
    BLOCK_SIZE: tl.constexpr = SHAPE.BLOCK_SIZE
    token = tl.arange(0, TILE)
    if TILE % BLOCK_SIZE and BLOCK_SIZE % TILE:
        token += tile_begin
        return token // BLOCK_SIZE, token % BLOCK_SIZE
    return (
        tile_begin // BLOCK_SIZE + token // BLOCK_SIZE,
        tile_begin % BLOCK_SIZE + token % BLOCK_SIZE,
    )


@triton.jit
def load_blocks(table_ptr, tile_begin, first_token, end_token, SHAPE: tl.constexpr):
    """The KV block of each token of the tile that begins at `tile_begin`, -1 for those that are not
    read."""
    token = tile_begin + tl.arange(0, SHAPE.TILE)
    is_read = token < end_token
    if SHAPE.HAS_WINDOW:  # else an item begins where a tile does
        is_read &= token >= first_token
    number, _ = places_of(tile_begin, SHAPE)
    return tl.load(table_ptr + number, mask=is_read, other=-1)


@triton.jit
def load_first_blocks(
    item, rows, inputs, numbers, strides, ROWS: tl.constexpr, SHAPE: tl.constexpr
):
    """The KV blocks of an item's first tile, -1 for tokens that no row sees, and what rows hide of
    it."""
    _, visible, bits_row = rows
    _, _, _, table_ptr, _, bits_ptr, _, _, _ = inputs
    _, _, _, table_stride, bits_stride, _, _ = strides
    _, _, window = numbers
    first_token, end_token, first_tile = first_tile_of(item, visible, window, ROWS, SHAPE)
    table_ptr += item[0].to(tl.int64) * table_stride
    blocks = load_blocks(table_ptr, first_tile, first_token, end_token, SHAPE)
    word = tl.zeros((ROWS,), tl.int64)
    if SHAPE.HIDES:
        word = load_hidden(bits_ptr, bits_row, first_tile, end_token, bits_stride, SHAPE.TILE)
        blocks = without_hidden(blocks, word, SHAPE.TILE)
    return blocks, word
