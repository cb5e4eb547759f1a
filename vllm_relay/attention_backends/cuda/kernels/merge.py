# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel that merges the states of a row, and merging of two finished attentions."""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_relay.attention_backends.cuda.kernels.attention import fold, no_tokens, store_result
from vllm_relay.attention_backends.cuda.plans import plan as gpu_plan

ENTRY_FIELDS: tl.constexpr = tl.constexpr(gpu_plan.ENTRY_FIELDS)
ENTRIES: tl.constexpr = tl.constexpr(gpu_plan.ENTRIES)
SLOT_KINDS: tl.constexpr = tl.constexpr(gpu_plan.SLOT_KINDS)
BEGINS_SEGMENT: tl.constexpr = tl.constexpr(gpu_plan.BEGINS_SEGMENT)
BEGINS_SECTION: tl.constexpr = tl.constexpr(gpu_plan.BEGINS_SECTION)
IS_SECTION: tl.constexpr = tl.constexpr(gpu_plan.IS_SECTION)


@triton.jit
def _load_state(
    states, slot, head, is_head, NUM_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    PADDED_HEAD: tl.constexpr,
):  # fmt: skip
    total_ptr, reference_ptr, state_ptr = states
    dim = tl.arange(0, PADDED_HEAD)
    slot_head = slot.to(tl.int64) * NUM_HEADS + head
    total = tl.load(total_ptr + slot_head, mask=is_head, other=0.0)
    reference = tl.load(reference_ptr + slot_head, mask=is_head, other=0.0)
    output = tl.load(
        state_ptr + slot_head[:, None] * HEAD_SIZE + dim[None, :],
        mask=is_head[:, None] & (dim < HEAD_SIZE)[None, :],
        other=0.0,
    )
    return total, reference, output


@triton.jit
def merge_kernel(
    plan_ptr, sinks_ptr, v_scale_ptr,
    total_ptr, reference_ptr, state_ptr, out_ptr, lse_ptr,
    out_stride_token, out_stride_head,
    HEADS: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    PADDED_HEAD: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """One program merges `HEADS` heads of one entry: tiles into segments, segments into sections,
    sections into the result, each in token order."""
    entry_ptr = plan_ptr + tl.load(plan_ptr + ENTRIES) + tl.program_id(0) * ENTRY_FIELDS
    slot = tl.load(entry_ptr + 3)
    end_slot = tl.load(entry_ptr + ENTRY_FIELDS + 3)
    if slot == end_slot:
        return
    token = tl.load(entry_ptr)
    kinds_ptr = plan_ptr + tl.load(plan_ptr + SLOT_KINDS)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, PADDED_HEAD)
    is_head = head < NUM_HEADS
    mask = is_head[:, None] & (dim < HEAD_SIZE)[None, :]

    result = no_tokens(HEADS, PADDED_HEAD)
    section = no_tokens(HEADS, PADDED_HEAD)
    segment = no_tokens(HEADS, PADDED_HEAD)
    next_kind = tl.load(kinds_ptr + slot)
    states = (total_ptr, reference_ptr, state_ptr)
    next_state = _load_state(states, slot, head, is_head, NUM_HEADS, HEAD_SIZE, PADDED_HEAD)
    while slot < end_slot:
        kind, state = next_kind, next_state
        slot += 1
        # ahead of its use, so that a row does not wait for memory once per state
        next_kind = tl.load(kinds_ptr + slot, mask=slot < end_slot, other=0)
        next_state = _load_state(
            states, slot, head, is_head & (slot < end_slot), NUM_HEADS, HEAD_SIZE, PADDED_HEAD
        )
        if (kind & BEGINS_SEGMENT) != 0:
            section = fold(section, segment, 1.0)
            segment = no_tokens(HEADS, PADDED_HEAD)
        if (kind & BEGINS_SECTION) != 0:
            result = fold(result, section, 1.0)
            section = no_tokens(HEADS, PADDED_HEAD)
        if (kind & IS_SECTION) != 0:
            section = fold(section, state, 1.0)
        else:
            segment = fold(segment, state, 1.0)

    out_row = token.to(tl.int64) * out_stride_token + (head * out_stride_head)[:, None]
    store_result(
        fold(result, fold(section, segment, 1.0), 1.0), head, out_ptr + out_row + dim[None, :],
        lse_ptr + token * NUM_HEADS + head, is_head, mask, sinks_ptr, v_scale_ptr, HAS_SINKS,
        HAS_LSE,
    )  # fmt: skip
