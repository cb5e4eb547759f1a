# SPDX-License-Identifier: Apache-2.0
"""Requests with modules in the RELAY backend for CUDA: hidden slots hold NaN."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.attention_backends.test_relay_cuda import (
    BLOCK_SIZE,
    DECODES,
    HEAD_SIZE,
    LAYER,
    NUM_BLOCKS,
    NUM_HEADS,
    NUM_KV_HEADS,
    PROMPTS,
    Builder,
    Impl,
    begin,
    make_builder,
    step,
)
from vllm_relay.attention_backends import reference
from vllm_relay.attention_backends.cuda import prompts as gpu_prompts
from vllm_relay.attention_backends.cuda import relay as relay_cuda
from vllm_relay.attention_backends.cuda.hidden_bits import SEES_ALL
from vllm_relay.attention_backends.cuda.launch import Workspace
from vllm_relay.attention_backends.hidden_tokens import Ranges
from vllm_relay.modules.engine import worker

Runs = dict[int, list[tuple[int, int, Ranges]]]
"""By request: first slot, end, and what they hide."""

END = sys.maxsize
PADDED = ((20, 32),)
MORE = ((20, 40), (50, 64))


class PlanOfRuns:
    """What a worker asks a plan: which slots are computed in one run, and what they hide."""

    def __init__(self, runs: list[tuple[int, int, Ranges]]) -> None:
        self.runs = runs
        self.run_slots = [first for first, _, _ in runs] + [runs[-1][1]]
        self.last_hidden_slots = runs[-1][2]

    def computed_runs(self, begin: int) -> list[tuple[int, int, Ranges]]:
        return [each for each in self.runs if each[1] > begin]

    def hidden_slots(self, hidden: Ranges) -> Ranges:
        return hidden


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A builder whose requests may have modules, and what tells it about them."""
    monkeypatch.setattr(relay_cuda, "row_source", lambda vllm_config: worker.state)

    def builder_of(cls: Any) -> Any:
        return make_builder(cls, monkeypatch)

    def hide(runs: Runs) -> None:
        modular = {str(r): PlanOfRuns(each) for r, each in runs.items()}
        monkeypatch.setattr(worker.state, "requests", modular)
        batch = SimpleNamespace(req_ids=[str(number) for number in range(12)])
        monkeypatch.setattr(worker.state, "batch", batch)

    return SimpleNamespace(builder=builder_of, hide=hide)


def caches(common: Any, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A KV cache for the reference, and the same with NaN in every slot that nobody sees."""
    torch.manual_seed(seed)
    cache = torch.randn(NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)
    rows = worker.state.rows_of_step(common.query_start_loc_cpu.numpy(), common.seq_lens.numpy())
    seen = np.zeros((NUM_BLOCKS, BLOCK_SIZE), bool)
    if rows is None:
        return cache, cache
    requests = np.arange(len(rows.seq_lens)) if rows.requests is None else rows.requests
    for row, (request, seq_len) in enumerate(zip(requests, rows.seq_lens.tolist(), strict=True)):
        for first, last in rows.hidden.visible_pieces(row, 0, seq_len):
            slots = np.arange(first, last)
            blocks = common.block_table_tensor[int(request)].numpy()[slots // BLOCK_SIZE]
            seen[blocks, slots % BLOCK_SIZE] = True
    poisoned = cache.clone()
    poisoned.masked_fill_(~torch.from_numpy(seen)[:, None, :, None], torch.nan)
    return cache, poisoned


def expected_of(query: torch.Tensor, cache: torch.Tensor, common: Any) -> torch.Tensor:
    starts, lens = common.query_start_loc_cpu.numpy(), common.seq_lens.numpy()
    rows = worker.state.rows_of_step(starts, lens)
    table, hidden = common.block_table_tensor, None
    if rows is not None:
        starts, lens, hidden = rows.query_start_loc, rows.seq_lens, rows.hidden
        if rows.requests is not None:
            table = table[torch.from_numpy(rows.requests)]
    keys, values = cache.chunk(2, dim=-1)
    output, _ = reference.relay_attention(
        query[: int(starts[-1])],
        reference.pack_kv_cache(keys.contiguous(), values.contiguous()),
        table,
        torch.from_numpy(starts),
        torch.from_numpy(lens),
        scale=0.2,
        num_kv_heads=NUM_KV_HEADS,
        hidden=hidden,
    )
    return output


def check_step(builder: Any, impl: Any, requests: list[Any], seed: int = 0) -> Any:
    common = step(requests)
    cache, poisoned = caches(common, seed)
    query = torch.randn(common.num_actual_tokens, NUM_HEADS, HEAD_SIZE)
    key, value = torch.randn(2, common.num_actual_tokens, NUM_KV_HEADS, HEAD_SIZE)
    metadata = builder.build(0, begin(builder, common))
    for each in (cache, poisoned):
        impl.do_kv_cache_update(LAYER, key, value, each, common.slot_mapping)
    output = torch.full_like(query, torch.nan)
    if metadata.prompts is not None:
        poisoned = cache  # the stock backend multiplies by zero
    impl.forward(LAYER, query, key, value, poisoned, metadata, output)
    torch.testing.assert_close(output, expected_of(query, cache, common), rtol=1e-5, atol=1e-5)
    return metadata


@pytest.mark.parametrize("classes", [(Builder, Impl), (None, None)], ids=["stock", "relay only"])
@pytest.mark.parametrize(
    ("requests", "runs", "prompts_hide"),
    [
        (DECODES, {0: [(64, END, PADDED)], 2: [(64, END, MORE)]}, False),
        (DECODES, {n: [(64, END, PADDED)] for n in range(4)}, False),
        (DECODES + PROMPTS, {1: [(64, END, PADDED)]}, False),
        (DECODES + PROMPTS, {4: [(64, END, PADDED)], 3: [(64, END, MORE)]}, True),
        (PROMPTS, {0: [(64, 75, PADDED), (75, 80, MORE), (80, END, ((0, 32),))]}, True),
        # what it hid is behind it, and what it will hide is not there yet
        (PROMPTS, {0: [(64, 66, MORE), (66, 95, ()), (95, END, PADDED)]}, False),
    ],
    ids=["decodes", "all the same", "decodes beside", "both", "several runs", "other runs"],
)
def test_step_is_that_of_the_reference(
    make: Any, classes: Any, requests: list[Any], runs: Runs, prompts_hide: bool
) -> None:
    builder_cls, impl_cls = classes
    builder = make.builder(builder_cls or relay_cuda.RelayCudaMetadataBuilder)
    impl = (impl_cls or relay_cuda.RelayCudaImpl)(NUM_HEADS, HEAD_SIZE, 0.2, NUM_KV_HEADS)
    make.hide(runs)
    metadata = check_step(builder, impl, requests)
    if builder_cls is not None:
        has_prompts = len(requests) != len(DECODES)
        has_decodes = metadata.num_decode_tokens > 0
        assert (len(metadata.chunks) > has_decodes) == prompts_hide
        assert (metadata.prompts is not None) == (has_prompts and not prompts_hide)
    make.hide({})
    metadata = check_step(builder, impl, requests, seed=1)
    assert builder_cls is None or len(metadata.chunks) == (metadata.num_decode_tokens > 0)


def test_prompts_are_cut_to_fit_the_workspace(make: Any) -> None:
    """Results are those of one launch, to the bit."""
    builder = make.builder(Builder)
    make.hide({0: [(64, 75, PADDED), (75, END, MORE)], 1: [(0, END, ())]})
    common = step(PROMPTS)
    cache, _ = caches(common, 0)
    query = torch.randn(common.num_actual_tokens, NUM_HEADS, HEAD_SIZE)
    impl = Impl(NUM_HEADS, HEAD_SIZE, 0.2, NUM_KV_HEADS)
    rows = worker.state.rows_of_step(common.query_start_loc_cpu.numpy(), common.seq_lens.numpy())
    assert rows is not None
    outputs = []
    for max_slots in (1000, 33, 14, 2):
        planner = builder.planner
        planner.plan.workspace = Workspace.allocate(max_slots, planner.setup, planner.device)
        chunks = gpu_prompts.plan_prompts(
            common.query_start_loc_cpu.numpy(),
            common.seq_lens.numpy(),
            common.block_table_tensor,
            runs=rows.hidden.query_runs(rows.query_start_loc),
            planner=planner,
        )
        tokens = [range(chunk.tokens.start, chunk.tokens.stop) for chunk in chunks]
        assert [token for each in tokens for token in each] == list(range(60))
        assert all(2 * len(each) <= max_slots for each in tokens)
        metadata = builder.build(0, common)
        metadata.chunks = chunks
        outputs.append(torch.full_like(query, torch.nan))
        impl.forward(LAYER, query, query, query, cache, metadata, outputs[-1])
    for output in outputs[1:]:
        assert torch.equal(output, outputs[0])


def test_one_captured_step_serves_requests_that_hide_and_others(make: Any) -> None:
    """A FULL CUDA graph reads what is hidden from buffers that stay where they are."""
    builder = make.builder(Builder)
    impl = Impl(NUM_HEADS, HEAD_SIZE, 0.2, NUM_KV_HEADS)
    make.hide({})
    common = step(DECODES[:1], padding_rows=4)
    captured = builder.build_for_cudagraph_capture(common)
    for seed, (requests, runs) in enumerate(
        [
            (DECODES, {0: [(64, END, PADDED)], 3: [(64, END, MORE)]}),
            (DECODES[1:], {}),
            (DECODES[::-1], {3: [(64, END, PADDED)], 0: [(64, END, MORE)]}),
            (DECODES[:1], {0: [(64, END, ((0, 64),))]}),
        ]
    ):
        make.hide(runs)
        now = step(requests, padding_rows=5 - len(requests))
        common.block_table_tensor.copy_(now.block_table_tensor)
        common.query_start_loc.copy_(now.query_start_loc)
        common.seq_lens.copy_(now.seq_lens)
        common.seq_lens_cpu_upper_bound.copy_(now.seq_lens)
        builder.build(0, begin(builder, common))
        real = step(requests)
        cache, poisoned = caches(real, seed)
        query = torch.randn(5, NUM_HEADS, HEAD_SIZE)
        output = torch.full_like(query, 7.0)
        impl.forward(LAYER, query, None, None, poisoned, captured, output)
        expected = expected_of(query, cache, real)
        torch.testing.assert_close(output[: len(requests)], expected, rtol=1e-5, atol=1e-5)
        assert (output[len(requests) :] == 7.0).all()


def test_engines_without_modules_have_no_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = make_builder(Builder, monkeypatch)
    assert builder.planner.hidden is None and builder.planner.plan.hidden is None


def test_rows_of_bits_are_enough_for_every_decode(make: Any) -> None:
    builder = make.builder(Builder)
    hidden = builder.planner.hidden
    assert len(hidden.bits) >= builder.vllm_config.scheduler_config.max_num_seqs
    assert (hidden.row_of_token == SEES_ALL).all()
