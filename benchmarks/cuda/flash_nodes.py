# SPDX-License-Identifier: Apache-2.0
"""FlashAttention over the nodes of a forest, as it is called on a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from benchmarks.cuda.inputs import Inputs
from vllm_relay.attention_backends.cuda.flash.attention import FlashAttention, NodeShapes
from vllm_relay.attention_backends.cuda.flash.tune import nodes_of


def prepare(
    inputs: Inputs,
    flash_attention: FlashAttention,
    schedule: Callable[..., Any],
    *,
    piece_tokens: int | None,
    is_captured: bool = False,
    in_branches: bool = True,
    node_options: Mapping[str, Any] = MappingProxyType({}),
) -> Callable[[], torch.Tensor]:
    """One layer: both calls and the merge; tables and the schedule of tails are made beforehand, as
    for all layers of a step.

    Args:
        schedule: FlashAttention's schedule of a call with these arguments, or None.
        piece_tokens: into which nodes are cut; None: as the backend would.
        is_captured: with room for all nodes that a step may have, as in a captured step.
        in_branches: nodes and tails beside each other, as in a captured step.
        node_options: more of FlashAttention's, for the nodes.
    """
    batch, geometry = inputs.batch, inputs.geometry
    assert batch.host is not None
    buffers, nodes = nodes_of(
        batch.host.block_table,
        batch.host.query_start_loc,
        batch.host.seq_lens,
        block_size=geometry.block_size,
        num_heads=geometry.num_heads,
        num_kv_heads=geometry.num_kv_heads,
        device=inputs.query.device,
        piece_tokens=piece_tokens,
    )
    if not in_branches:
        buffers.branch.stream = None
    shapes = NodeShapes.of(nodes)
    if is_captured:
        max_tokens = batch.block_table.shape[1] * geometry.block_size
        shapes = NodeShapes.captured(buffers.limits, batch.num_requests, max_tokens)
    buffers.write_tables(batch.block_table, batch.seq_lens, shapes.num_entries)
    key, value = inputs.keys_and_values()
    out = torch.empty_like(inputs.query)
    options = {"softmax_scale": geometry.scale, "softcap": inputs.features.soft_cap or 0.0}
    lengths = {"max_seqlen_q": batch.max_query_len, "max_seqlen_k": batch.max_seq_len}
    tail_schedule = schedule(
        q=inputs.query,
        k=key,
        v=value,
        cu_seqlens_q=batch.query_start_loc,
        seqused_k=buffers.tail_lens[: batch.num_requests],
        block_table=buffers.tail_table[: batch.num_requests],
        causal=True,
        **lengths,
        **options,
    )

    def run() -> torch.Tensor:
        buffers.attend(
            flash_attention, inputs.query, key, value, out, shapes,
            query_start_loc=batch.query_start_loc,
            tails={**lengths, "scheduler_metadata": tail_schedule}, nodes=node_options,
            sinks=inputs.sinks, **options,
        )  # fmt: skip
        return out

    return run
