# SPDX-License-Identifier: Apache-2.0
"""A worker with one layer of RELAY_SPARSE, driven as vLLM does, and compared with attention in
float64: blocks that left the device, and all that was never written, hold NaN."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_relay.attention_backends.cpu import relay
from vllm_relay.attention_backends.cuda import relay as relay_cuda
from vllm_relay.attention_backends.sparse import common, cpu
from vllm_relay.attention_backends.worker_blocks import WorkerBlocks
from vllm_relay.long_context.host import host_sequence
from vllm_relay.long_context.host.worker import LongContextWorker, worker_of
from vllm_relay.long_context.orders import KEEP_ARG, ORDERS_ATTRIBUTE, Placement, StepOrders
from vllm_relay.long_context.scheduling.kv_cache_spec import RelaySparseSpec
from vllm_relay.long_context.window import WindowPolicy

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


dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
readings = pytest.mark.parametrize(
    "options", [{}, {"alpha": 1e-37}], ids=["everything", "retrieved"]
)


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
    """What is alike on all devices.

    Args:
        kv_cache: [blocks, kv_heads, tokens, 2 * size], full of NaN.
    """

    def __init__(
        self, policy: WindowPolicy, kv_cache: torch.Tensor, options: dict[str, Any]
    ) -> None:
        self.policy, self.kv_cache, self.dtype = policy, kv_cache, kv_cache.dtype
        self.free = list(range(1, NUM_BLOCKS))
        self.finished: list[str] = []
        self.config = VllmConfig(
            device_config=DeviceConfig(device="cpu"),
            additional_config={"relay": {"alpha": 0.0} | options},
        )

    @classmethod
    def begin_process(cls, monkeypatch: pytest.MonkeyPatch) -> None:
        """A worker process of its own, whose sequences grow by little."""
        monkeypatch.setattr(common, "_config", [])
        monkeypatch.setattr(common, "call_before_each_step", lambda name, on_step: None)
        monkeypatch.setattr(common.recorder, "take_long_contexts", None)
        for each in (relay, relay_cuda):
            monkeypatch.setattr(
                each, "get_num_attention_heads_from_layers", lambda *args: NUM_HEADS
            )
        blocks = WorkerBlocks()
        monkeypatch.setattr(relay_cuda, "follow_blocks", lambda vllm_config: blocks)
        monkeypatch.setattr(host_sequence, "GRANULE_TOKENS", 40)

    @property
    def long_contexts(self) -> LongContextWorker:
        """What the worker knows of its requests."""
        found = worker_of(self.config)
        assert found is not None
        return found

    def spec(self, max_blocks: int) -> RelaySparseSpec:
        return RelaySparseSpec.of(
            FullAttentionSpec(**SHAPE, dtype=self.dtype), self.policy, max_blocks
        )

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def sequence(
        self, name: str, num_tokens: int, num_prompt_tokens: int, like: Sequence | None = None
    ) -> Sequence:
        """Args: like: the keys and values of another one."""
        generator = torch.Generator().manual_seed(sum(name.encode()))

        def states(num_heads: int) -> torch.Tensor:
            made = torch.randn(num_tokens, num_heads, HEAD_SIZE, generator=generator)
            return made.to(self.dtype)

        keys, values = states(NUM_KV_HEADS), states(NUM_KV_HEADS)
        if like is not None:
            keys, values = like.keys[:num_tokens], like.values[:num_tokens]
        return Sequence(name, num_prompt_tokens, keys, values, 2 * states(NUM_HEADS))

    def allocate(self, sequence: Sequence, num_tokens: int) -> None:
        gap = self.policy.residency(
            sequence.num_computed_tokens, sequence.num_prompt_tokens, sequence.first_resident_token
        )
        gone = slice(*(each // BLOCK_SIZE for each in gap))
        if not sequence.is_new:  # it keeps what it hits for a step
            left = [block for block in sequence.blocks[gone] if block]
            sequence.blocks[gone] = [0] * len(sequence.blocks[gone])
            self.poison(left)
        while len(sequence.blocks) * BLOCK_SIZE < sequence.num_computed_tokens + num_tokens:
            sequence.blocks.append(self.free.pop(0))

    def announce(
        self,
        sequences: list[Sequence],
        resumed: AbstractSet[str] = frozenset(),
        kept: Collection[str] = (),
        **orders: Any,
    ) -> None:
        """Begins a step.

        Args:
            resumed: names of those that begin again.
            kept: of those that are to become contexts.
        """
        new = [
            SimpleNamespace(
                req_id=each.name,
                sampling_params=SimpleNamespace(
                    max_tokens=len(each.keys),
                    extra_args={KEEP_ARG: True} if each.name in kept else None,
                ),
                prompt_token_ids=[0] * each.num_prompt_tokens,
            )
            for each in sequences
            if each.is_new
        ]
        output = SimpleNamespace(
            finished_req_ids=self.finished,
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(
                resumed_req_ids=resumed - {each.req_id for each in new}
            ),
        )
        self.finished = []
        setattr(output, ORDERS_ATTRIBUTE, StepOrders(**orders))
        for each in sequences:
            each.is_new = False
        batch = SimpleNamespace(req_ids=[each.name for each in sequences])
        common.begin_step(
            SimpleNamespace(
                model_runner=SimpleNamespace(input_batch=batch),
                model_config=SimpleNamespace(max_model_len=MAX_MODEL_LEN),
                vllm_config=self.config,
            ),
            output,
        )

    def metadata(self, ranges: list[tuple[Sequence, int, int]]) -> CommonAttentionMetadata:
        counts = [end - start for _, start, end in ranges]
        ends = torch.tensor([end for _, _, end in ranges], dtype=torch.int32)
        query_start_loc = torch.tensor([0, *counts]).cumsum(0).int()
        tables = [each.blocks + [0] * (MAX_BLOCKS - len(each.blocks)) for each, _, _ in ranges]
        slots = [
            each.blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            for each, start, end in ranges
            for position in range(start, end)
        ]
        return CommonAttentionMetadata(
            query_start_loc=self.to_device(query_start_loc.clone()),
            query_start_loc_cpu=query_start_loc,
            seq_lens=self.to_device(ends.clone()),
            seq_lens_cpu_upper_bound=ends,
            num_reqs=len(ranges),
            num_actual_tokens=sum(counts),
            max_query_len=max(counts),
            max_seq_len=int(ends.max()),
            block_table_tensor=self.to_device(torch.tensor(tables, dtype=torch.int32)),
            slot_mapping=self.to_device(torch.tensor(slots)),
            causal=True,
        )

    def preempt(self, sequence: Sequence) -> None:
        self.poison([block for block in sequence.blocks if block])
        sequence.blocks = []

    def resume(self, sequence: Sequence, context_id: str | None = None) -> Placement:
        """It gets null blocks for what the host has; with the next step."""
        first = sequence.num_computed_tokens // BLOCK_SIZE * BLOCK_SIZE
        sequence.first_resident_token = first
        sequence.blocks = [0] * (first // BLOCK_SIZE)
        return Placement(sequence.num_computed_tokens, first, context_id)

    def own(self, sequence: Sequence) -> host_sequence.HostLayer:
        found = self.long_contexts.requests[sequence.name].sequence
        assert found is not None
        return found.layers["layer"]

    def check_copy(self, sequence: Sequence) -> None:
        """The host has all tokens that are computed once the copies have arrived."""
        self.long_contexts.pending_writes.finish()
        own = self.own(sequence)
        assert own.end == sequence.num_computed_tokens
        keys, values = own.rows(own.begin, own.end)
        assert torch.equal(keys.transpose(0, 1), sequence.keys[own.begin : own.end])
        assert torch.equal(values.transpose(0, 1), sequence.values[own.begin : own.end])

    def poison(self, blocks: list[int]) -> None:
        self.kv_cache[blocks] = torch.nan
        self.free += blocks


class CpuWorker(Worker):
    """The backend for CPUs."""

    def __init__(self, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        shape = NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, 2 * HEAD_SIZE
        super().__init__(POLICY, torch.full(shape, torch.nan, dtype=dtype), options)
        with set_current_vllm_config(self.config):
            self.impl = cpu.RelaySparseImpl(
                NUM_HEADS, HEAD_SIZE, scale=HEAD_SIZE**-0.5, num_kv_heads=NUM_KV_HEADS
            )
        self.builder = cpu.RelaySparseMetadataBuilder(
            self.spec(12), ["layer"], self.config, torch.device("cpu")
        )

    def step(
        self,
        *chunks: tuple[Sequence, int],
        placed: dict[str, Placement] | None = None,
        resumed: AbstractSet[str] = frozenset(),
        **orders: Any,
    ) -> None:
        """Computes so many tokens of each sequence, and compares."""
        for sequence, num_tokens in chunks:
            self.allocate(sequence, num_tokens)
        orders["placed"] = placed or {}
        self.announce([each for each, _ in chunks], {*orders["placed"], *resumed}, **orders)
        ranges = [
            (each, each.num_computed_tokens, each.num_computed_tokens + count)
            for each, count in chunks
        ]
        common = self.metadata(ranges)
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
        for sequence, _, end in ranges:
            sequence.num_computed_tokens = end
