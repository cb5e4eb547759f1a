# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel that merges the states of a row, and merging of two finished attentions."""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_relay.attention_backends.cuda import plan as gpu_plan
from vllm_relay.attention_backends.cuda.kernels.attention import EMPTY, finish, fold
from vllm_relay.attention_backends.cuda.kernels.plan import piece_end

RANGE_FIELDS: tl.constexpr = tl.constexpr(gpu_plan.RANGE_FIELDS)
CHAIN_STRIDE: tl.constexpr = tl.constexpr(2 * (gpu_plan.MAX_DEPTH + 1))


@triton.jit
def _load_state(
    total_ptr,
    reference_ptr,
    state_ptr,
    slot,
    head,
    is_head,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD: tl.constexpr,
):
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
    token_request_ptr,
    token_entry_ptr,
    chain_length_ptr,
    chains_ptr,
    ranges_ptr,
    sinks_ptr,
    v_scale_ptr,
    total_ptr,
    reference_ptr,
    state_ptr,
    out_ptr,
    lse_ptr,
    out_stride_token,
    out_stride_head,
    HEADS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD: tl.constexpr,
    TILE: tl.constexpr,
    SEGMENT: tl.constexpr,
    SECTION: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """One program merges `HEADS` heads of one query token: tiles into segments, segments into
    sections, sections into the result, each in token order."""
    token = tl.program_id(0)
    request = tl.load(token_request_ptr + token)
    if request < 0:
        return
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, PADDED_HEAD)
    is_head = head < NUM_HEADS
    mask = is_head[:, None] & (dim < HEAD_SIZE)[None, :]
    entry_of_token = tl.load(token_entry_ptr + token)

    total = tl.zeros((HEADS,), tl.float32)
    reference = tl.full((HEADS,), EMPTY, tl.float32)
    output = tl.zeros((HEADS, PADDED_HEAD), tl.float32)
    section_total, section_reference, section_output = total, reference, output
    segment_total, segment_reference, segment_output = total, reference, output

    chain_ptr = chains_ptr + request * CHAIN_STRIDE
    for link in range(tl.load(chain_length_ptr + request)):
        range_ptr = ranges_ptr + tl.load(chain_ptr + 2 * link) * RANGE_FIELDS
        entry = tl.load(chain_ptr + 2 * link + 1) + entry_of_token
        begin = tl.load(range_ptr)
        end = tl.load(range_ptr + 1)
        num_slots = tl.load(range_ptr + 3)
        folds = tl.load(range_ptr + 4)
        slot = tl.load(range_ptr + 2) + entry * num_slots
        next_total, next_reference, next_output = _load_state(
            total_ptr, reference_ptr, state_ptr, slot, head, is_head & (num_slots > 0),
            NUM_HEADS, HEAD_SIZE, PADDED_HEAD,
        )  # fmt: skip
        for index in range(num_slots):
            state_total, state_reference, state_output = next_total, next_reference, next_output
            # ahead of its use, so that a row does not wait for memory once per state
            next_total, next_reference, next_output = _load_state(
                total_ptr, reference_ptr, state_ptr, slot + index + 1, head,
                is_head & (index + 1 < num_slots), NUM_HEADS, HEAD_SIZE, PADDED_HEAD,
            )  # fmt: skip
            if begin % SEGMENT == 0:
                section_total, section_reference, section_output = fold(
                    section_total, section_reference, section_output,
                    segment_total, segment_reference, segment_output, 1.0,
                )  # fmt: skip
                segment_total = tl.zeros((HEADS,), tl.float32)
                segment_reference = tl.full((HEADS,), EMPTY, tl.float32)
                segment_output = tl.zeros((HEADS, PADDED_HEAD), tl.float32)
            if begin % SECTION == 0:
                total, reference, output = fold(
                    total, reference, output,
                    section_total, section_reference, section_output, 1.0,
                )  # fmt: skip
                section_total = tl.zeros((HEADS,), tl.float32)
                section_reference = tl.full((HEADS,), EMPTY, tl.float32)
                section_output = tl.zeros((HEADS, PADDED_HEAD), tl.float32)
            state_end, is_section = piece_end(begin, end, folds, SEGMENT, SECTION)
            if is_section:
                section_total, section_reference, section_output = fold(
                    section_total, section_reference, section_output,
                    state_total, state_reference, state_output, 1.0,
                )  # fmt: skip
            else:
                segment_total, segment_reference, segment_output = fold(
                    segment_total, segment_reference, segment_output,
                    state_total, state_reference, state_output, 1.0,
                )  # fmt: skip
                if begin % SEGMENT != 0:  # a state per tile
                    state_end = tl.minimum(begin + TILE, end)
            begin = state_end

    section_total, section_reference, section_output = fold(
        section_total, section_reference, section_output,
        segment_total, segment_reference, segment_output, 1.0,
    )  # fmt: skip
    total, reference, output = fold(
        total, reference, output, section_total, section_reference, section_output, 1.0
    )
    sink = tl.zeros((HEADS,), tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head, mask=is_head, other=0.0).to(tl.float32)
    v_scale = tl.load(v_scale_ptr)
    output, lse = finish(total, reference, output, sink, v_scale, HAS_SINKS)
    tl.store(
        out_ptr
        + token.to(tl.int64) * out_stride_token
        + (head * out_stride_head)[:, None]
        + dim[None, :],
        output.to(out_ptr.dtype.element_ty),
        mask=mask,
    )
    if HAS_LSE:
        tl.store(lse_ptr + token * NUM_HEADS + head, lse, mask=is_head)
