# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel that computes attention states: shared and private ranges in one launch.

Work is a list of items (`plan.py`): rows of the batch, the KV tokens they read together, and
where their states go. A row is one query token at one query head; the rows of a kv head that meet
in a span are stacked into one tile of the matrix unit.

Nothing here depends on which other rows are in a tile: scores, references and sums of a row are its
own, and the sums over tokens are cut at fixed positions (docs/cuda-triton.md).
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_relay.attention_backends.cuda.kernels.hidden import hide, load_hidden, without_hidden
from vllm_relay.attention_backends.cuda.kernels.items import (
    ENTRY_FIELDS,
    SEGMENTS,
    TILES,
    first_tile_of,
    load_blocks,
    load_first_blocks,
    load_item,
    load_rows,
    places_of,
)
from vllm_relay.attention_backends.cuda.plans import plan as gpu_plan
from vllm_relay.attention_backends.cuda.plans import plan_cuts

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
EMPTY: tl.constexpr = tl.constexpr(-1.0e30)
"""Reference of the state of no tokens."""

INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)

FOLD: tl.constexpr = tl.constexpr(plan_cuts.MODE_FOLD)
DIRECT: tl.constexpr = tl.constexpr(plan_cuts.MODE_DIRECT)
ENTRIES: tl.constexpr = tl.constexpr(gpu_plan.ENTRIES)
PROGRAM_STARTS: tl.constexpr = tl.constexpr(gpu_plan.PROGRAM_STARTS)
ITEMS: tl.constexpr = tl.constexpr(gpu_plan.ITEMS)
WORKS: tl.constexpr = tl.constexpr(gpu_plan.WORKS)


@triton.jit
def power_of_two(exponent):
    """2^exponent for float integers <= 0, exactly; 0 where it would be denormal."""
    clamped = tl.maximum(exponent, -127.0).to(tl.int32)
    return ((clamped + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def no_tokens(ROWS: tl.constexpr, PADDED_HEAD: tl.constexpr):
    """The state of no tokens: sums of weights, references, sums of weights times values."""
    total = tl.zeros((ROWS,), tl.float32)
    reference = tl.full((ROWS,), EMPTY, tl.float32)
    return total, reference, tl.zeros((ROWS, PADDED_HEAD), tl.float32)


@triton.jit
def fold(state, other, fraction):
    """The state of both sets of tokens, where the sums of the other are to be multiplied by
    `fraction` first, 1 for a state that is complete.

    References are integers, so the factors are powers of two: each number is rounded by the product
    with `fraction` and by the addition, in whichever kernel that happens."""
    total, reference, output = state
    other_total, other_reference, other_output = other
    joint = tl.maximum(reference, other_reference)
    factor = power_of_two(reference - joint)
    other_factor = fraction * power_of_two(other_reference - joint)
    total = tl.fma(total, factor, other_total * other_factor)
    factors = tl.broadcast_to(factor[:, None], output.shape)
    output = tl.fma(output, factors, other_output * other_factor[:, None])
    return total, joint, output


@triton.jit
def finish(total, reference, output, sink, v_scale, HAS_SINKS: tl.constexpr):
    """Normalised output and natural log-sum-exp of finished states."""
    if HAS_SINKS:
        sink *= LOG2_E
        sink_reference = tl.ceil(sink)
        joint = tl.maximum(reference, sink_reference)
        factor = power_of_two(reference - joint)
        total = total * factor + tl.exp2(sink - joint)
        output = output * factor[:, None]
        reference = joint
    seen = total > 0
    output = tl.where(seen[:, None], output * v_scale / tl.where(seen, total, 1.0)[:, None], 0.0)
    lse = tl.where(seen, (tl.log2(tl.where(seen, total, 1.0)) + reference) * LN_2, -float("inf"))
    return output, lse


@triton.jit
def store_result(
    state, head, out_pointers, lse_pointers, is_row, mask, sinks_ptr, v_scale_ptr,
    HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """Writes rows whose states are finished; `head` is the query head of each."""
    total, reference, output = state
    sink = tl.zeros(total.shape, tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head, mask=is_row, other=0.0).to(tl.float32)
    v_scale = tl.load(v_scale_ptr)
    output, lse = finish(total, reference, output, sink, v_scale, HAS_SINKS)
    tl.store(out_pointers, output.to(out_pointers.dtype.element_ty), mask=mask)
    if HAS_LSE:
        tl.store(lse_pointers, lse, mask=is_row)


@triton.jit
def wait_for_threads():
    """What all threads of the program have loaded and stored comes before what they will. Triton
    copies no tile ahead in a loop with a barrier of its own."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "bar.sync 0; mov.u32 $0, 0;", "=r,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _tile_state(
    query, kv_ptr, blocks, tile_begin, all_see, visible, some_hide, hidden, slope, numbers,
    SHAPE: tl.constexpr,
):  # fmt: skip
    """State of the tile of tokens that begins at `tile_begin`, and what its sums are still to be
    multiplied by, relative to the reference.

    `blocks`: -1 for tokens that are not read; `all_see`: tokens within are seen by all rows."""
    all_see_from, all_see_until = all_see
    scale, soft_cap, window = numbers
    token = tile_begin + tl.arange(0, SHAPE.TILE)
    dim = tl.arange(0, SHAPE.PADDED_HEAD)
    _, place = places_of(tile_begin, SHAPE)
    offset = blocks.to(tl.int64) * SHAPE.BLOCK_STRIDE
    pointers = kv_ptr + (place * SHAPE.TOKEN_STRIDE)[:, None] + dim[None, :] + offset[:, None]
    mask = (blocks >= 0)[:, None]
    if SHAPE.PADDED_HEAD != SHAPE.HEAD_SIZE:
        mask = mask & (dim < SHAPE.HEAD_SIZE)[None, :]
    key = tl.load(pointers, mask=mask, other=0.0).to(query.dtype)
    product = tl.dot(query, tl.trans(key), input_precision=SHAPE.PRECISION)
    if SHAPE.HAS_SOFT_CAP:
        product *= scale
        product = soft_cap * (1.0 - 2.0 / (tl.exp2(product * (2.0 * LOG2_E / soft_cap)) + 1.0))
    if SHAPE.HAS_ALIBI:
        if not SHAPE.HAS_SOFT_CAP:
            product *= scale
        distance = (token[None, :] - (visible - 1)[:, None]).to(tl.float32)
        product = tl.fma(tl.broadcast_to(slope[:, None], product.shape), distance, product)
    # what is left to multiply scores by, into units of log2: a factor above zero
    factor = LOG2_E
    if not (SHAPE.HAS_SOFT_CAP or SHAPE.HAS_ALIBI):
        factor = scale * LOG2_E
    if (tile_begin < all_see_from) | (tile_begin + SHAPE.TILE > all_see_until):
        sees = token[None, :] < visible[:, None]
        if SHAPE.HAS_WINDOW:
            sees = sees & (token[None, :] >= (visible - window)[:, None])
        product = tl.where(sees, product, -float("inf"))
    if some_hide:
        product = hide(product, hidden, SHAPE.TILE)

    largest = tl.max(product, 1)
    sees_any = largest > -float("inf")
    largest = tl.where(sees_any, largest * factor, 0.0)
    value = tl.load(pointers + SHAPE.HEAD_SIZE, mask=mask, other=0.0).to(query.dtype)
    # the largest weight is exactly 1, whatever it is rounded to
    exponent = tl.fma(product, tl.full(product.shape, 0.0, tl.float32) + factor, -largest[:, None])
    weight = tl.exp2(exponent).to(query.dtype)
    # a sum on the matrix unit is the same however a tile is spread over warps
    TILE: tl.constexpr = SHAPE.TILE
    ones = tl.full((TILE, 8), 1.0, query.dtype)
    total = tl.max(tl.dot(weight, ones, input_precision=SHAPE.PRECISION), 1)
    output = tl.dot(weight, value, input_precision=SHAPE.PRECISION)
    reference = tl.where(sees_any, tl.ceil(largest), EMPTY)
    return (total, reference, output), tl.exp2(largest - tl.ceil(largest))


@triton.jit
def _attend_item(
    item, rows, first, entries_ptr, inputs, results, numbers, strides, ROWS: tl.constexpr,
    SHAPE: tl.constexpr,
):  # fmt: skip
    table_row, first_entry, row_first, num_rows, begin, item_end, slot, mode, head = item
    PADDED_HEAD: tl.constexpr = SHAPE.PADDED_HEAD
    token, visible, bits_row = rows
    blocks, hidden = first
    query_ptr, kv_ptr, v_scale_ptr, table_ptr, _, bits_ptr, _, slopes_ptr, sinks_ptr = inputs
    total_ptr, reference_ptr, state_ptr, out_ptr, lse_ptr = results
    _, _, window = numbers
    query_token, query_step, kv_head, table, bits, out_token, out_step = strides
    row = row_first + tl.arange(0, ROWS)
    is_row = row < num_rows
    entry = row // SHAPE.GROUP
    query_head = head * SHAPE.GROUP + row % SHAPE.GROUP
    dim = tl.arange(0, SHAPE.PADDED_HEAD)
    row_mask = is_row[:, None] & (dim < SHAPE.HEAD_SIZE)[None, :]
    query = tl.load(
        query_ptr
        + token.to(tl.int64)[:, None] * query_token
        + (query_head * query_step)[:, None]
        + dim[None, :],
        mask=row_mask,
        other=0.0,
    )
    slope = tl.zeros((ROWS,), tl.float32)
    if SHAPE.HAS_ALIBI:
        slope = tl.load(slopes_ptr + query_head, mask=is_row, other=0.0)

    first_token, end_token, first_tile = first_tile_of(item, visible, window, ROWS, SHAPE)
    # every state is written, whether or not anybody sees a token of it
    last_tile = first_tile
    if mode == TILES:
        last_tile = (item_end - 1) // SHAPE.TILE * SHAPE.TILE
    if mode == SEGMENTS:
        last_tile = (item_end - 1) // SHAPE.SEGMENT * SHAPE.SEGMENT
    end_tile = tl.maximum(end_token, last_tile + 1)
    all_see_until = tl.min(tl.where(is_row, visible, 2147483647), 0)
    all_see_from = 0
    if SHAPE.HAS_WINDOW:
        all_see_from = tl.max(visible, 0) - window
    some_hide = SHAPE.HIDES
    if SHAPE.HIDES:
        some_hide = tl.max(bits_row, 0) >= 0
    kv_ptr += head.to(tl.int64) * kv_head
    table_ptr += table_row.to(tl.int64) * table
    entry_ptr = entries_ptr + (first_entry + entry) * ENTRY_FIELDS
    slot_row = slot + tl.load(entry_ptr + 3, mask=is_row, other=0)
    slot_row = slot_row * SHAPE.NUM_HEADS + query_head

    state = no_tokens(ROWS, PADDED_HEAD)
    holds_state = False
    stages: tl.constexpr = SHAPE.LARGE_STAGES if ROWS >= 64 else None
    for tile_begin in tl.range(first_tile, end_tile, SHAPE.TILE, num_stages=stages):
        next_tile = tile_begin + SHAPE.TILE
        # one tile ahead: Triton does not pipeline a load whose address waits for another load
        next_blocks = load_blocks(table_ptr, next_tile, first_token, end_token, SHAPE)
        next_hidden = hidden
        if SHAPE.HIDES:
            next_hidden = load_hidden(bits_ptr, bits_row, next_tile, end_token, bits, SHAPE.TILE)
            next_blocks = without_hidden(next_blocks, next_hidden, SHAPE.TILE)
        tile_state, fraction = _tile_state(
            query, kv_ptr, blocks, tile_begin, (all_see_from, all_see_until), visible, some_hide,
            hidden, slope, numbers, SHAPE,
        )  # fmt: skip
        blocks, hidden = next_blocks, next_hidden
        state = fold(state, tile_state, fraction)
        is_last = (next_tile % SHAPE.SEGMENT == 0) | (next_tile >= end_tile) | (mode == TILES)
        if is_last & (mode != DIRECT):
            # int64: states of a large batch exceed 2^31 floats
            state_row = slot_row.to(tl.int64)[:, None] * SHAPE.HEAD_SIZE
            state_pointers = state_ptr + state_row + dim[None, :]
            # this program's state of the segments before: threads load what others have stored, and
            # store what others have loaded
            if holds_state:
                wait_for_threads()
                before_total = tl.load(total_ptr + slot_row, mask=is_row, other=0.0)
                before_reference = tl.load(reference_ptr + slot_row, mask=is_row, other=0.0)
                before_output = tl.load(state_pointers, mask=row_mask, other=0.0)
                wait_for_threads()
                state = fold((before_total, before_reference, before_output), state, 1.0)
            total, reference, output = state
            tl.store(total_ptr + slot_row, total, mask=is_row)
            tl.store(reference_ptr + slot_row, reference, mask=is_row)
            tl.store(state_pointers, output, mask=row_mask)
            holds_state = mode == FOLD
            if mode != FOLD:
                slot_row += SHAPE.NUM_HEADS
            state = no_tokens(ROWS, PADDED_HEAD)
    if mode == DIRECT:
        out_row = token.to(tl.int64)[:, None] * out_token + (query_head * out_step)[:, None]
        store_result(
            state, query_head, out_ptr + out_row + dim[None, :],
            lse_ptr + token * SHAPE.NUM_HEADS + query_head, is_row, row_mask, sinks_ptr,
            v_scale_ptr, SHAPE.HAS_SINKS, SHAPE.HAS_LSE,
        )  # fmt: skip


@triton.jit
def _attend_items(
    items_ptr, works_ptr, work, end_work, entries_ptr, inputs, results, numbers, strides,
    ROWS: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    """One run of works. What an item needs first is loaded while the items before it are computed:
    many items are shorter than the wait for a chain of loads."""
    item = load_item(items_ptr, works_ptr, work, end_work, SHAPE)
    rows = load_rows(entries_ptr, item, inputs, ROWS, SHAPE)
    first = load_first_blocks(item, rows, inputs, numbers, strides, ROWS, SHAPE)
    next_item = load_item(items_ptr, works_ptr, work + 1, end_work, SHAPE)
    while work < end_work:
        next_rows = load_rows(entries_ptr, next_item, inputs, ROWS, SHAPE)
        next_first = load_first_blocks(next_item, next_rows, inputs, numbers, strides, ROWS, SHAPE)
        last_item = load_item(items_ptr, works_ptr, work + 2, end_work, SHAPE)
        _attend_item(item, rows, first, entries_ptr, inputs, results, numbers, strides, ROWS, SHAPE)
        rows, first = next_rows, next_first
        item, next_item = next_item, last_item
        work += 1


@triton.jit(do_not_specialize=["soft_cap", "window", "scale", "bits_stride"])
def attention_kernel(
    plan_ptr, query_ptr, kv_ptr, k_scale_ptr, v_scale_ptr, table_ptr, seq_lens_ptr,
    bits_ptr, bits_row_ptr, slopes_ptr, sinks_ptr,
    total_ptr, reference_ptr, state_ptr, out_ptr, lse_ptr,
    scale, soft_cap, window,
    query_stride_token, query_stride_head, kv_stride_head, table_stride, bits_stride,
    out_stride_token, out_stride_head,
    LARGE_ROWS: tl.constexpr, SMALL_ROWS: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    """Every program does its own works, those of large tiles first. The number of programs does not
    depend on the batch, so that a CUDA graph replays with other plans."""
    entries_ptr = plan_ptr + tl.load(plan_ptr + ENTRIES)
    items_ptr = plan_ptr + tl.load(plan_ptr + ITEMS)
    works_ptr = plan_ptr + tl.load(plan_ptr + WORKS)
    starts_ptr = plan_ptr + tl.load(plan_ptr + PROGRAM_STARTS) + 2 * tl.program_id(0)
    first_large = tl.load(starts_ptr)
    first_small = tl.load(starts_ptr + 1)
    end_work = tl.load(starts_ptr + 2)
    inputs = (
        query_ptr, kv_ptr, v_scale_ptr, table_ptr, seq_lens_ptr, bits_ptr, bits_row_ptr, slopes_ptr,
        sinks_ptr,
    )  # fmt: skip
    results = (total_ptr, reference_ptr, state_ptr, out_ptr, lse_ptr)
    numbers = (scale * tl.load(k_scale_ptr), soft_cap, window)
    strides = (
        query_stride_token, query_stride_head, kv_stride_head, table_stride, bits_stride,
        out_stride_token, out_stride_head,
    )  # fmt: skip
    _attend_items(
        items_ptr, works_ptr, first_large, first_small, entries_ptr, inputs, results, numbers,
        strides, LARGE_ROWS, SHAPE,
    )  # fmt: skip
    _attend_items(
        items_ptr, works_ptr, first_small, end_work, entries_ptr, inputs, results, numbers,
        strides, SMALL_ROWS, SHAPE,
    )  # fmt: skip
