# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels around vLLM's over the nodes of a forest: block tables and queries of their
batches, and the merging of what they computed.

What differs from step to step is not specialized: a variant more is compiled while requests wait.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_relay.attention_backends.cuda.flash import nodes

ENTRY_FIELDS: tl.constexpr = tl.constexpr(nodes.ENTRY_FIELDS)
TABLE_ROW: tl.constexpr = tl.constexpr(nodes.TABLE_ROW)
FIRST_BLOCK: tl.constexpr = tl.constexpr(nodes.FIRST_BLOCK)
TOKENS: tl.constexpr = tl.constexpr(nodes.TOKENS)


@triton.jit(do_not_specialize=["num_requests", "block_table_stride", "out_stride"])
def tables_kernel(
    block_table_ptr, seq_lens_ptr, entries_ptr, shared_tokens_ptr,
    tail_table_ptr, tail_lens_ptr, entry_table_ptr, entry_lens_ptr,
    num_requests, block_table_stride, out_stride,
    BLOCK_SIZE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """One program for each request, which moves its row to where its tail begins, and one for each
    entry, which copies the blocks of a piece of a node."""
    program = tl.program_id(0)
    if program < num_requests:
        shared = tl.load(shared_tokens_ptr + program)
        tokens = tl.load(seq_lens_ptr + program) - shared
        source = program
        first = shared // BLOCK_SIZE
        table_ptr = tail_table_ptr + program.to(tl.int64) * out_stride
        tl.store(tail_lens_ptr + program, tokens)
    else:
        entry = program - num_requests
        fields_ptr = entries_ptr + entry * ENTRY_FIELDS
        source = tl.load(fields_ptr + TABLE_ROW)
        first = tl.load(fields_ptr + FIRST_BLOCK)
        tokens = tl.load(fields_ptr + TOKENS)
        table_ptr = entry_table_ptr + entry.to(tl.int64) * out_stride
        tl.store(entry_lens_ptr + entry, tokens)
    num_blocks = tl.cdiv(tokens, BLOCK_SIZE)
    source_ptr = block_table_ptr + source.to(tl.int64) * block_table_stride + first
    for begin in range(0, num_blocks, LANES):
        lane = begin + tl.arange(0, LANES)
        blocks = tl.load(source_ptr + lane, mask=lane < num_blocks, other=0)
        tl.store(table_ptr + lane, blocks, mask=lane < num_blocks)


@triton.jit
def gather_rows_kernel(
    rows_ptr, num_rows_ptr, query_ptr, out_ptr, query_stride_token,
    NUMBERS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Copies the queries of all entries, of `NUMBERS` numbers each, as many as there are now."""
    for row in range(tl.program_id(0), tl.load(num_rows_ptr), tl.num_programs(0)):
        source_ptr = query_ptr + tl.load(rows_ptr + row).to(tl.int64) * query_stride_token
        row_ptr = out_ptr + tl.cast(row, tl.int64) * NUMBERS
        for begin in range(0, NUMBERS, LANES):
            lane = begin + tl.arange(0, LANES)
            numbers = tl.load(source_ptr + lane, mask=lane < NUMBERS)
            tl.store(row_ptr + lane, numbers, mask=lane < NUMBERS)


@triton.jit(do_not_specialize=["entry_lse_stride", "lse_stride"])
def merge_nodes_kernel(
    states_ptr, entry_out_ptr, entry_lse_ptr, out_ptr, lse_ptr, sinks_ptr,
    entry_lse_stride, lse_stride, out_stride_token, out_stride_head,
    NUM_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, HEADS: tl.constexpr,
    PADDED_HEAD: tl.constexpr, MAX_STATES: tl.constexpr, HAS_SINKS: tl.constexpr,
    LSE_UNIT: tl.constexpr,
):  # fmt: skip
    """One program adds the states of the nodes, and sinks, to `HEADS` heads of a query token's
    tail, which `out` and `lse` hold; `out` is replaced. Logarithms of sums are in `LSE_UNIT`."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(states_ptr + token * MAX_STATES)
    if not HAS_SINKS and row < 0:
        return
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, PADDED_HEAD)
    is_head = head < NUM_HEADS
    mask = is_head[:, None] & (dim < HEAD_SIZE)[None, :]
    out_place = out_ptr + token * out_stride_token + head[:, None] * out_stride_head + dim[None, :]

    total = tl.full((HEADS,), 1.0, tl.float32)
    reference = LSE_UNIT * tl.load(
        lse_ptr + head.to(tl.int64) * lse_stride + token, mask=is_head, other=0.0
    )
    output = tl.load(out_place, mask=mask, other=0.0).to(tl.float32)
    for level in tl.static_range(MAX_STATES):
        row = tl.load(states_ptr + token * MAX_STATES + level).to(tl.int64)
        is_there = row >= 0
        other = LSE_UNIT * tl.load(
            entry_lse_ptr + head.to(tl.int64) * entry_lse_stride + row,
            mask=is_head & is_there,
            other=float("-inf"),
        )
        state = tl.load(
            entry_out_ptr + (row * NUM_HEADS + head[:, None]) * HEAD_SIZE + dim[None, :],
            mask=mask & is_there,
            other=0.0,
        ).to(tl.float32)
        largest = tl.maximum(reference, other)
        kept, added = tl.exp(reference - largest), tl.exp(other - largest)
        total = total * kept + added
        output = output * kept[:, None] + state * added[:, None]
        reference = largest
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head, mask=is_head, other=float("-inf")).to(tl.float32)
        largest = tl.maximum(reference, sink)
        total = total * tl.exp(reference - largest) + tl.exp(sink - largest)
        output = output * tl.exp(reference - largest)[:, None]
    tl.store(out_place, (output / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
