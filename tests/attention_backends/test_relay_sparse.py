# SPDX-License-Identifier: Apache-2.0
"""The RELAY_SPARSE backend's classes as vLLM drives them, against attention in float64: blocks that
left the device, and all that was never written, hold NaN."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import DeviceConfig, VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from tests.attention_backends.sparse_cuda_worker import CudaWorker
from tests.attention_backends.sparse_worker import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    SHAPE,
    CpuWorker,
    dtypes,
    readings,
)
from vllm_relay.attention_backends.sparse import common, cpu
from vllm_relay.long_context.scheduling.kv_cache_spec import RelaySparseSpec
from vllm_relay.long_context.window import WindowPolicy

pytestmark = pytest.mark.skipif(
    not current_platform.is_cpu(), reason="relay's kernels are for CPUs"
)


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> None:
    CpuWorker.begin_process(monkeypatch)


@dtypes
@readings
def test_a_long_prompt_is_computed_in_chunks_and_decoded(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """Beside a short request, and one that becomes long while it is decoded."""
    run = CpuWorker(dtype, **options)
    long = run.sequence("long", 500, 400)
    short, growing = run.sequence("short", 90, 20), run.sequence("growing", 250, 60)
    run.step((long, 100))
    run.step((long, 90), (short, 20))
    run.step((growing, 60), (long, 100), (short, 1))
    run.step((growing, 1), (long, 110), (short, 1))
    for _ in range(60):
        run.step((growing, 1), (short, 1), (long, 1))
        run.check_copy(long)
        grown = growing.num_computed_tokens
        assert (run.long_contexts.requests["growing"].sequence is None) == (grown < 100)
    for _ in range(20):
        run.step((long, 2), (growing, 3))
    run.check_copy(growing)
    assert run.long_contexts.requests["short"].sequence is None
    assert bool(run.own(long).segments) == bool(options)
    assert sum(map(bool, long.blocks)) < len(long.blocks) / 2


@dtypes
@pytest.mark.parametrize("num_hits", [2, 7])
def test_tokens_of_hit_blocks_are_copied_from_the_device(dtype: torch.dtype, num_hits: int) -> None:
    run = CpuWorker(dtype)
    first = run.sequence("first", 300, 224)
    run.step((first, 224))
    second = run.sequence("second", 400, 380, like=run.sequence("same", 400, 1))
    hit_tokens = num_hits * BLOCK_SIZE
    second.keys[:hit_tokens], second.values[:hit_tokens] = (
        first.keys[:hit_tokens],
        first.values[:hit_tokens],
    )
    third = run.sequence("third", 90, 80, like=first)  # stays short
    for sequence, number in ((second, num_hits), (third, 2)):
        sequence.blocks = first.blocks[:number]
        sequence.num_computed_tokens = number * BLOCK_SIZE
    run.step((second, 70), (third, 10))
    run.check_copy(second)
    assert run.long_contexts.requests["third"].sequence is None
    for _ in range(80):
        run.step((second, 1))
    run.check_copy(second)


@dtypes
@readings
@pytest.mark.parametrize("num_tokens", [225, 250, 256], ids=["one", "most", "none"])
def test_a_resumed_request_gets_the_first_tokens_of_its_block_back(
    dtype: torch.dtype, options: dict[str, Any], num_tokens: int
) -> None:
    run = CpuWorker(dtype, **options)
    long, other = run.sequence("long", 400, 220), run.sequence("other", 400, 220)
    run.step((long, 220), (other, 200))
    while long.num_computed_tokens < num_tokens:
        run.step((long, 1), (other, 1))
    run.preempt(long)
    for _ in range(4):
        run.step((other, 1))
    placement = run.resume(long)
    run.step((other, 1), (long, 1), placed={"long": placement})
    run.check_copy(long)
    for _ in range(100):
        run.step((long, 1), (other, 1))
    run.check_copy(long)


def test_two_engines_in_one_process() -> None:
    """Their requests have the same names; neither sees the other's, nor counts them."""
    first, second = CpuWorker(torch.float32, alpha=1e-37), CpuWorker(torch.bfloat16, alpha=1e-37)
    one, other = first.sequence("long", 400, 220), second.sequence("long", 400, 250)
    first.step((one, 220))
    second.step((other, 250))
    for _ in range(30):
        first.step((one, 1))
        assert common.recorder.take_long_contexts is not None
        assert common.recorder.take_long_contexts().host_searches > 0
        second.step((other, 1))
    first.check_copy(one)
    second.check_copy(other)
    assert first.long_contexts.stats.searches == 0 < second.long_contexts.stats.searches
    first.finished = ["long"]
    first.step((first.sequence("short", 9, 9), 9))
    assert first.long_contexts.requests.keys() == {"short"}
    assert second.long_contexts.requests.keys() == {"long"}
    second.step((other, 1))


def test_steps_of_other_engines_are_none_of_relay_sparse() -> None:
    run = CpuWorker()
    run.step((run.sequence("long", 400, 220), 220))
    stock = SimpleNamespace(vllm_config=VllmConfig(device_config=DeviceConfig(device="cpu")))
    common.begin_step(stock, None)
    assert common.recorder.take_long_contexts is None
    assert run.long_contexts.requests.keys() == {"long"}


def test_a_dropped_request_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run = CpuWorker(alpha=1e-37)
    long = run.sequence("long", 400, 220)
    run.step((long, 220))
    for _ in range(5):
        run.step((long, 1))
    assert run.own(long).segments
    run.preempt(long)
    long.num_computed_tokens = 0
    run.long_contexts.requests["long"].sequence = None
    run.step((long, 110))
    run.check_copy(long)
    run.step((long, 116))
    run.step((long, 1))
    run.check_copy(long)


@pytest.mark.parametrize("worker_class", [CpuWorker, CudaWorker])
def test_blocks_are_brought_back_before_others_copy_them(
    worker_class: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker_class.begin_process(monkeypatch)
    run = worker_class()
    first = run.sequence("first", 400, 220)
    run.step((first, 220))
    for _ in range(10):
        run.step((first, 1))
    hits = run.sequence("hits", 400, 300, like=first)
    # blocks that were computed by another one, and the one that is filled in this step
    same = run.sequence("same", 224, 224, like=first)
    run.step((same, 224))
    run.preempt(first)
    placement = run.resume(first)
    run.allocate(first, 26)
    hits.blocks = same.blocks[:7] + first.blocks[7:]
    assert all(hits.blocks) and len(hits.blocks) == 8
    hits.num_computed_tokens = 256
    run.step((hits, 1), (first, 26), placed={"first": placement})
    run.check_copy(first)
    run.check_copy(hits)


def test_a_run_without_requests_is_planned_as_it_is() -> None:
    """vLLM's dummy runs name no requests."""
    run = CpuWorker()
    sequence = run.sequence("a", 128, 128)
    sequence.blocks = [3, 1, 4, 2]
    metadata = run.builder.build(0, run.metadata([(sequence, 0, 128)]))
    assert metadata.mirrored == []
    assert metadata.block_table[0].tolist()[:5] == [3, 1, 4, 2, 0]


def test_the_block_table_that_vllm_has_stays_as_it_is() -> None:
    run = CpuWorker()
    long = run.sequence("long", 400, 300)
    run.step((long, 300))
    run.announce([long])
    run.allocate(long, 1)
    common = run.metadata([(long, 300, 301)])
    before = common.block_table_tensor.clone()
    metadata = run.builder.build(0, common)
    assert torch.equal(common.block_table_tensor, before)
    assert common.seq_lens.tolist() == [301]
    # the sinks, and the window of 250 to 301
    assert metadata.block_table[0].tolist()[:4] == [long.blocks[0], *long.blocks[7:10]]
    (row,) = metadata.mirrored
    assert row.residency == (32, 224) and row.fill_from is None
    assert row.blocks.tolist() == before[0].tolist()


def test_layers_with_full_attention_get_a_window() -> None:
    full = FullAttentionSpec(**SHAPE, dtype=torch.float32)
    common._config[:] = [
        SimpleNamespace(
            additional_config={"relay": {"window_tokens": 300, "prefill": "exact_resident"}},
            model_config=SimpleNamespace(max_model_len=MAX_MODEL_LEN),
            max_in_flight_tokens=50,
        )
    ]
    spec = cpu.RelaySparseBackend.customize_spec(full)
    assert isinstance(spec, RelaySparseSpec)
    assert spec.policy == WindowPolicy(BLOCK_SIZE, 64, 300, 4096, "exact_resident")
    assert spec.max_blocks_per_request == -(-MAX_MODEL_LEN // BLOCK_SIZE)
    for other in (
        SlidingWindowSpec(**SHAPE, dtype=torch.float32, sliding_window=64),
        FullAttentionSpec(**SHAPE, dtype=torch.float32, sliding_window=64),
        spec,
    ):
        assert cpu.RelaySparseBackend.customize_spec(other) is other
