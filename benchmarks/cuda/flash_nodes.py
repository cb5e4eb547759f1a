# SPDX-License-Identifier: Apache-2.0
"""FlashAttention over the nodes of a forest, as it is called on a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.cuda.inputs import Inputs
from vllm_relay.attention_backends.cuda.flash.attention import (
    FlashAttention,
    NodeBuffers,
    NodeShapes,
)
from vllm_relay.attention_backends.cuda.flash.nodes import (
    FLASH_COST,
    MAX_ENTRIES,
    MAX_STATES,
    NodeBatch,
    NodeLimits,
    balanced_piece_tokens,
    node_batch,
)
from vllm_relay.attention_backends.cuda.launch import num_multiprocessors
from vllm_relay.attention_backends.groups import find_groups


def nodes_of(inputs: Inputs, piece_tokens: int | None) -> tuple[NodeLimits, NodeBatch]:
    """What the backend would plan for a batch of decodes; None: cut as it would."""
    batch, geometry = inputs.batch.host, inputs.geometry
    assert batch is not None
    requests = batch.num_requests
    limits = NodeLimits(requests, requests, requests, MAX_ENTRIES, MAX_STATES)
    query_lens = np.diff(batch.query_start_loc)
    group_size = geometry.num_heads // geometry.num_kv_heads
    forest = find_groups(
        batch.block_table,
        query_lens,
        batch.seq_lens - 1,
        block_size=geometry.block_size,
        group_size=group_size,
        cost=FLASH_COST,
    )
    if piece_tokens is None:
        piece_tokens = balanced_piece_tokens(
            forest,
            query_lens,
            group_size=group_size,
            num_kv_heads=geometry.num_kv_heads,
            num_sms=num_multiprocessors(inputs.query.device),
        )
    _, found = node_batch(
        forest,
        batch.query_start_loc,
        block_size=geometry.block_size,
        limits=limits,
        piece_tokens=piece_tokens,
    )
    return limits, found


def prepare(
    inputs: Inputs,
    flash_attention: FlashAttention,
    schedule: Callable[..., Any],
    *,
    piece_tokens: int | None,
    is_captured: bool = False,
) -> Callable[[], torch.Tensor]:
    """One layer: both calls and the merge; tables and the schedule of tails are made beforehand, as
    for all layers of a step.

    Args:
        schedule: FlashAttention's schedule of a call with these arguments, or None.
        piece_tokens: into which nodes are cut; None: as the backend would.
        is_captured: with room for all nodes that a step may have, as in a captured step.
    """
    batch, geometry = inputs.batch, inputs.geometry
    limits, nodes = nodes_of(inputs, piece_tokens)
    buffers = NodeBuffers(
        limits,
        block_size=geometry.block_size,
        max_blocks=batch.block_table.shape[1],
        device=inputs.query.device,
    )
    shapes = NodeShapes.of(nodes)
    if is_captured:
        max_tokens = batch.block_table.shape[1] * geometry.block_size
        shapes = NodeShapes.captured(limits, batch.num_requests, max_tokens)
    buffers.upload(nodes, batch.num_requests)
    buffers.write_tables(batch.block_table, batch.seq_lens, shapes.num_entries)
    key, value = inputs.keys_and_values()
    out = torch.empty_like(inputs.query)
    options = {"softmax_scale": geometry.scale, "softcap": inputs.features.soft_cap or 0.0}
    tails = {
        "q": inputs.query,
        "k": key,
        "v": value,
        "cu_seqlens_q": batch.query_start_loc,
        "max_seqlen_q": batch.max_query_len,
        "seqused_k": buffers.tail_lens[: batch.num_requests],
        "max_seqlen_k": batch.max_seq_len,
        "block_table": buffers.tail_table[: batch.num_requests],
        "causal": True,
        **options,
    }
    tail_schedule = schedule(**tails)

    def run() -> torch.Tensor:
        _, lse = flash_attention(
            **tails, out=out, scheduler_metadata=tail_schedule, return_softmax_lse=True
        )
        buffers.attend(
            flash_attention, inputs.query, key, value, out, lse, shapes,
            sinks=inputs.sinks, num_splits=int(is_captured), **options,
        )  # fmt: skip
        return out

    return run
