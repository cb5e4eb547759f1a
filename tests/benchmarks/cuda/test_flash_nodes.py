# SPDX-License-Identifier: Apache-2.0
"""What is timed on a GPU, with a twin of FlashAttention: it computes what the kernels compute."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.attention.batches import shared_prefix
from benchmarks.cuda.flash_nodes import prepare
from benchmarks.cuda.forests import shuffled
from benchmarks.cuda.geometry import Geometry
from benchmarks.cuda.inputs import DeviceBatch, Inputs, KvPool
from benchmarks.cuda.limits import planner_limits
from tests.attention_backends.flash_twin import flash_attn_varlen_func
from vllm_relay.attention_backends.cuda.flash.tune import nodes_of


def test_nodes_and_tails_are_the_attention_of_the_batch() -> None:
    geometry = Geometry(4, 2, 32)
    batch = shuffled(shared_prefix(5, 640, 40, geometry.block_size))
    limits = planner_limits(requests=16, tokens=32, seq_len=2048)
    pool = KvPool(1 << 22, "cpu")
    inputs = Inputs.of(
        DeviceBatch.upload(batch, limits, "cpu"), geometry, pool.cache(geometry, batch.num_blocks)
    )
    scheduled: list[bool] = []

    def schedule(**arguments: Any) -> None:
        scheduled.append(arguments["causal"])

    _, nodes = nodes_of(
        batch.block_table, batch.query_start_loc, batch.seq_lens, block_size=geometry.block_size,
        num_heads=4, num_kv_heads=2, device=torch.device("cpu"), piece_tokens=128,
    )  # fmt: skip
    assert len(nodes.entries) == 5 and len(nodes.rows) == 25
    key, value = inputs.keys_and_values()
    expected = flash_attn_varlen_func(
        inputs.query, key, value, inputs.batch.max_query_len, inputs.batch.query_start_loc,
        inputs.batch.max_seq_len, inputs.batch.seq_lens, inputs.batch.block_table,
        geometry.scale, causal=True,
    )  # fmt: skip
    for is_captured in (False, True):
        out = prepare(
            inputs, flash_attn_varlen_func, schedule, piece_tokens=128, is_captured=is_captured
        )()
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
        assert not torch.equal(out, torch.zeros_like(out))
    assert scheduled == [True, True]  # tails alone: a layer makes the schedule of nodes itself
