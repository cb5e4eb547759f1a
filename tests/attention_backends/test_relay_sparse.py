# SPDX-License-Identifier: Apache-2.0
"""The RELAY_SPARSE backend's classes as vLLM drives them, against attention in float64: blocks that
left the device, and all that was never written, hold NaN."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from vllm_relay import compat
from vllm_relay.attention_backends import relay, relay_sparse, relay_sparse_base
from vllm_relay.long_context import host_sequence, worker
from vllm_relay.long_context.kv_cache_spec import RelaySparseSpec
from vllm_relay.long_context.orders import ATTRIBUTE, Placement, StepOrders
from vllm_relay.long_context.window import WindowPolicy

pytestmark = pytest.mark.skipif(
    not current_platform.is_cpu(), reason="relay's kernels are for CPUs"
)

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 4, 2, 48, 32
MAX_MODEL_LEN = 1000
NUM_BLOCKS, MAX_BLOCKS = 60, 32
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
POLICY = WindowPolicy(
    block_size_tokens=BLOCK_SIZE,
    sink_tokens=20,
    window_tokens=50,
    min_context_tokens=100,
    prefill="exact_offload",
)
SHAPE: dict[str, Any] = {
    "block_size": BLOCK_SIZE, "num_kv_heads": NUM_KV_HEADS, "head_size": HEAD_SIZE
}  # fmt: skip


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A worker process of its own."""
    monkeypatch.setattr(worker, "state", worker.LongContextWorker())
    monkeypatch.setattr(relay_sparse_base, "_config", [])
    monkeypatch.setattr(compat, "call_before_each_step", lambda on_step: None)
    monkeypatch.setattr(relay_sparse_base.recorder, "take_long_contexts", None)
    monkeypatch.setattr(relay, "get_num_attention_heads_from_layers", lambda *args: NUM_HEADS)
    monkeypatch.setattr(host_sequence, "GRANULE_TOKENS", 40)
    yield


@dataclass
class Sequence:
    """A request: keys, values and queries of all its tokens, and the blocks it has."""

    name: str
    num_prompt_tokens: int
    keys: torch.Tensor  # [tokens, kv_heads, size]
    values: torch.Tensor
    query: torch.Tensor  # [tokens, heads, size]
    num_computed_tokens: int = 0
    first_resident_token: int = 0
    blocks: list[int] = field(default_factory=list)
    is_new: bool = True

    def expected(self, begin: int, end: int) -> torch.Tensor:
        """float64 [tokens, heads, size]"""
        keys, values = (
            part[:end].double().repeat_interleave(NUM_HEADS // NUM_KV_HEADS, 1)
            for part in (self.keys, self.values)
        )
        scores = torch.einsum("thd,shd->hts", self.query[begin:end].double(), keys)
        positions = torch.arange(end)
        scores.masked_fill_(positions > positions[begin:end, None], -torch.inf)
        weights = (scores * HEAD_SIZE**-0.5).softmax(-1)
        return torch.einsum("hts,shd->thd", weights, values)


class Worker:
    """A worker with one layer."""

    def __init__(self, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.finished: list[str] = []
        self.config = config = VllmConfig(
            device_config=DeviceConfig(device="cpu"),
            additional_config={"relay": {"alpha": 0.0} | options},
        )
        spec = RelaySparseSpec.of(FullAttentionSpec(**SHAPE, dtype=dtype), POLICY, 12)
        with set_current_vllm_config(config):
            self.impl = relay_sparse.RelaySparseImpl(
                NUM_HEADS, HEAD_SIZE, scale=HEAD_SIZE**-0.5, num_kv_heads=NUM_KV_HEADS
            )
        self.builder = relay_sparse.RelaySparseMetadataBuilder(
            spec, ["layer"], config, torch.device("cpu")
        )
        self.dtype = dtype
        shape = NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE
        self.kv_cache = torch.full(shape, torch.nan, dtype=dtype)
        self.free = list(range(1, NUM_BLOCKS))

    def sequence(
        self, name: str, num_tokens: int, num_prompt_tokens: int, like: Sequence | None = None
    ) -> Sequence:
        """Args: like: the keys and values of another one."""
        generator = torch.Generator().manual_seed(sum(name.encode()))

        def states(num_heads: int) -> torch.Tensor:
            made = torch.randn(num_tokens, num_heads, HEAD_SIZE, generator=generator)
            return made.to(self.dtype)

        keys, values = (
            (states(NUM_KV_HEADS), states(NUM_KV_HEADS))
            if like is None
            else (like.keys[:num_tokens], like.values[:num_tokens])
        )
        return Sequence(name, num_prompt_tokens, keys, values, 2 * states(NUM_HEADS))

    def step(
        self,
        *chunks: tuple[Sequence, int],
        placed: dict[str, Placement] | None = None,
        resumed: AbstractSet[str] = frozenset(),
        **orders: Any,
    ) -> None:
        """Computes so many tokens of each sequence, and compares."""
        for sequence, num_tokens in chunks:
            self._allocate(sequence, num_tokens)
        orders["placed"] = placed or {}
        self._announce([each for each, _ in chunks], {*orders["placed"], *resumed}, **orders)
        starts = [sequence.num_computed_tokens for sequence, _ in chunks]
        ends = [start + chunk for start, (_, chunk) in zip(starts, chunks, strict=True)]
        common = self._metadata([each for each, _ in chunks], starts, ends)
        ranges = list(zip([each for each, _ in chunks], starts, ends, strict=True))
        key, value, query = (
            torch.cat([getattr(each, name)[start:end] for each, start, end in ranges])
            for name in ("keys", "values", "query")
        )
        metadata = self.builder.build(0, common)
        self.impl.do_kv_cache_update(None, key, value, self.kv_cache, common.slot_mapping)
        layer, output = SimpleNamespace(layer_name="layer"), torch.full_like(query, torch.nan)
        self.impl.forward(layer, query, key, value, self.kv_cache, metadata, output)
        expected = torch.cat([each.expected(start, end) for each, start, end in ranges])
        torch.testing.assert_close(output.double(), expected, atol=TOLERANCE[self.dtype], rtol=0)
        for (sequence, _), end in zip(chunks, ends, strict=True):
            sequence.num_computed_tokens = end

    def preempt(self, sequence: Sequence) -> None:
        self._poison([block for block in sequence.blocks if block])
        sequence.blocks = []

    def resume(self, sequence: Sequence) -> Placement:
        """It gets null blocks for what the host has; with the next step."""
        first = sequence.num_computed_tokens // BLOCK_SIZE * BLOCK_SIZE
        sequence.first_resident_token = first
        sequence.blocks = [0] * (first // BLOCK_SIZE)
        return Placement(sequence.num_computed_tokens, first, None)

    def own(self, sequence: Sequence) -> host_sequence.HostLayer:
        found = worker.state.requests[sequence.name].sequence
        assert found is not None
        return found.layers["layer"]

    def check_copy(self, sequence: Sequence) -> None:
        """The host has all tokens that are computed."""
        own = self.own(sequence)
        assert own.end == sequence.num_computed_tokens
        keys, values = own.rows(0, own.end)
        assert torch.equal(keys.transpose(0, 1), sequence.keys[: own.end])
        assert torch.equal(values.transpose(0, 1), sequence.values[: own.end])

    def _announce(
        self, sequences: list[Sequence], resumed: AbstractSet[str], **orders: Any
    ) -> None:
        output = SimpleNamespace(
            finished_req_ids=self.finished,
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=each.name,
                    sampling_params=SimpleNamespace(max_tokens=len(each.keys), extra_args=None),
                    prompt_token_ids=[0] * each.num_prompt_tokens,
                )
                for each in sequences
                if each.is_new
            ],
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=resumed),
        )
        self.finished = []
        setattr(output, ATTRIBUTE, StepOrders(**orders))
        for each in sequences:
            each.is_new = False
        batch = SimpleNamespace(
            req_ids=[each.name for each in sequences],
            num_prompt_tokens=np.array([each.num_prompt_tokens for each in sequences]),
        )
        worker.state.begin_step(
            SimpleNamespace(
                model_runner=SimpleNamespace(input_batch=batch),
                model_config=SimpleNamespace(max_model_len=MAX_MODEL_LEN),
                vllm_config=self.config,
            ),
            output,
        )

    def _allocate(self, sequence: Sequence, num_tokens: int) -> None:
        gap = POLICY.residency(
            sequence.num_computed_tokens, sequence.num_prompt_tokens, sequence.first_resident_token
        )
        gone = slice(*(each // BLOCK_SIZE for each in gap))
        if not sequence.is_new:  # it keeps what it hits for a step
            left = [block for block in sequence.blocks[gone] if block]
            sequence.blocks[gone] = [0] * len(sequence.blocks[gone])
            self._poison(left)
        while len(sequence.blocks) * BLOCK_SIZE < sequence.num_computed_tokens + num_tokens:
            sequence.blocks.append(self.free.pop(0))

    def _poison(self, blocks: list[int]) -> None:
        self.kv_cache[blocks] = torch.nan
        self.free += blocks

    def _metadata(
        self, sequences: list[Sequence], starts: list[int], ends: list[int]
    ) -> CommonAttentionMetadata:
        counts = [end - start for start, end in zip(starts, ends, strict=True)]
        query_start_loc = torch.tensor([0, *counts]).cumsum(0).int()
        tables = [each.blocks + [0] * (MAX_BLOCKS - len(each.blocks)) for each in sequences]
        slots = [
            each.blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            for each, start, end in zip(sequences, starts, ends, strict=True)
            for position in range(start, end)
        ]
        return CommonAttentionMetadata(
            query_start_loc=query_start_loc,
            query_start_loc_cpu=query_start_loc,
            seq_lens=torch.tensor(ends, dtype=torch.int32),
            num_reqs=len(sequences),
            num_actual_tokens=sum(counts),
            max_query_len=max(counts),
            max_seq_len=max(ends),
            block_table_tensor=torch.tensor(tables, dtype=torch.int32),
            slot_mapping=torch.tensor(slots),
            causal=True,
        )


dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
readings = pytest.mark.parametrize(
    "options", [{}, {"alpha": 1e-37}], ids=["everything", "retrieved"]
)


@dtypes
@readings
def test_a_long_prompt_is_computed_in_chunks_and_decoded(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """Beside a short request, and one that becomes long while it is decoded."""
    run = Worker(dtype, **options)
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
        assert (worker.state.requests["growing"].sequence is None) == (grown < 100)
    for _ in range(20):
        run.step((long, 2), (growing, 3))
    run.check_copy(growing)
    assert worker.state.requests["short"].sequence is None
    assert len(run.own(long).segments) == (1 if options else 0)
    assert sum(map(bool, long.blocks)) < len(long.blocks) / 2


@dtypes
@pytest.mark.parametrize("num_hits", [2, 7])
def test_tokens_of_hit_blocks_are_copied_from_the_device(dtype: torch.dtype, num_hits: int) -> None:
    run = Worker(dtype)
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
    assert worker.state.requests["third"].sequence is None
    for _ in range(80):
        run.step((second, 1))
    run.check_copy(second)


@dtypes
@readings
@pytest.mark.parametrize("num_tokens", [225, 250, 256], ids=["one", "most", "none"])
def test_a_resumed_request_gets_the_first_tokens_of_its_block_back(
    dtype: torch.dtype, options: dict[str, Any], num_tokens: int
) -> None:
    run = Worker(dtype, **options)
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


def test_a_dropped_request_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Worker(alpha=1e-37)
    long = run.sequence("long", 400, 220)
    run.step((long, 220))
    for _ in range(5):
        run.step((long, 1))
    assert run.own(long).segments
    run.preempt(long)
    long.num_computed_tokens = 0
    worker.state.requests["long"].sequence = None
    run.step((long, 110))
    run.check_copy(long)
    run.step((long, 116))
    run.step((long, 1))
    run.check_copy(long)


def test_blocks_are_brought_back_before_others_copy_them() -> None:
    run = Worker()
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
    run._allocate(first, 26)
    hits.blocks = same.blocks[:7] + first.blocks[7:]
    assert all(hits.blocks) and len(hits.blocks) == 8
    hits.num_computed_tokens = 256
    run.step((hits, 1), (first, 26), placed={"first": placement})
    run.check_copy(first)
    run.check_copy(hits)


def test_a_run_without_requests_is_planned_as_it_is() -> None:
    """vLLM's dummy runs name no requests."""
    run = Worker()
    sequence = run.sequence("a", 128, 128)
    sequence.blocks = [3, 1, 4, 2]
    metadata = run.builder.build(0, run._metadata([sequence], [0], [128]))
    assert metadata.mirrored == []
    assert metadata.block_table[0].tolist()[:5] == [3, 1, 4, 2, 0]


def test_the_block_table_that_vllm_has_stays_as_it_is() -> None:
    run = Worker()
    long = run.sequence("long", 400, 300)
    run.step((long, 300))
    run._announce([long], set())
    run._allocate(long, 1)
    common = run._metadata([long], [300], [301])
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
    relay_sparse_base._config[:] = [
        SimpleNamespace(
            additional_config={"relay": {"window_tokens": 300, "prefill": "exact_resident"}},
            model_config=SimpleNamespace(max_model_len=MAX_MODEL_LEN),
            max_in_flight_tokens=50,
        )
    ]
    spec = relay_sparse.RelaySparseBackend.customize_spec(full)
    assert isinstance(spec, RelaySparseSpec)
    assert spec.policy == WindowPolicy(BLOCK_SIZE, 64, 300, 4096, "exact_resident")
    assert spec.max_blocks_per_request == -(-MAX_MODEL_LEN // BLOCK_SIZE)
    for other in (
        SlidingWindowSpec(**SHAPE, dtype=torch.float32, sliding_window=64),
        FullAttentionSpec(**SHAPE, dtype=torch.float32, sliding_window=64),
        spec,
    ):
        assert relay_sparse.RelaySparseBackend.customize_spec(other) is other
