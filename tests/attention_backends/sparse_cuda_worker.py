# SPDX-License-Identifier: Apache-2.0
"""A worker with one layer of RELAY_SPARSE on a fake GPU, beside a stock backend that computes
prompts with the reference. Blocks that left the device, and all that was never written, hold NaN,
and so does what vLLM handed to a layer once that has returned: a CUDA graph may use it again."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tests.attention_backends.fake_device import fake_device, on_device, on_host
from tests.attention_backends.test_relay_sparse import (
    BLOCK_SIZE,
    HEAD_SIZE,
    MAX_BLOCKS,
    MAX_MODEL_LEN,
    NUM_BLOCKS,
    NUM_HEADS,
    NUM_KV_HEADS,
    SHAPE,
    TOLERANCE,
    Sequence,
)
from tests.attention_backends.test_relay_sparse import POLICY as OFFLOADING_POLICY
from vllm_relay.attention_backends import reference, relay_sparse_cuda, triton_kv_cache
from vllm_relay.long_context import host_sequence, worker
from vllm_relay.long_context.kv_cache_spec import RelaySparseSpec
from vllm_relay.long_context.orders import ATTRIBUTE, KEEP_ARG, Placement, StepOrders

POLICY = replace(OFFLOADING_POLICY, prefill="exact_resident")
MAX_NUM_SEQS = 8
ONE = on_device(torch.ones(1))


class StockBuilder:
    def __init__(self, *args: Any) -> None: ...

    def build(self, prefix: int, common: CommonAttentionMetadata, fast_build: bool) -> Any:
        return common


class StockImpl:
    def __init__(self, num_heads: int, head_size: int, scale: float, *args: Any) -> None:
        self.scale = scale

    def do_kv_cache_update(self, layer: Any, *tensors: torch.Tensor) -> None:
        key, value, kv_cache, slots = tensors
        triton_kv_cache.write_kv_cache(key, value, kv_cache, slots, ONE, ONE)

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, common: Any, output: Any
    ) -> None:
        keys, values = on_host(kv_cache).chunk(2, dim=-1)
        reference.relay_attention(
            on_host(query),
            reference.pack_kv_cache(keys.contiguous(), values.contiguous()),
            on_host(common.block_table_tensor).int(),
            on_host(common.query_start_loc),
            on_host(common.seq_lens),
            num_kv_heads=NUM_KV_HEADS,
            scale=self.scale,
            out=on_host(output),
        )


class Builder(relay_sparse_cuda.RelaySparseCudaMetadataBuilder):
    stock_builder_cls = StockBuilder


class Impl(relay_sparse_cuda.RelaySparseCudaImpl):
    stock_impl_cls = StockImpl


class Worker:
    """Drives the classes as vLLM does, and compares every step with attention in float64.

    Args:
        has_stock: or relay computes prompts too.
        has_sharing_layer: another layer reads the cache of the first.
    """

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        has_stock: bool = True,
        has_sharing_layer: bool = False,
        **options: Any,
    ) -> None:
        config = VllmConfig(
            device_config=DeviceConfig(device="cpu"),
            additional_config={"relay": {"alpha": 0.0} | options},
        )
        config.model_config = SimpleNamespace(max_model_len=MAX_MODEL_LEN)
        config.scheduler_config.max_num_seqs = MAX_NUM_SEQS
        config.scheduler_config.max_num_batched_tokens = 300
        config.compilation_config.cudagraph_capture_sizes = []
        config.cache_config.num_gpu_blocks = NUM_BLOCKS
        config.cache_config.block_size = BLOCK_SIZE
        spec = RelaySparseSpec.of(FullAttentionSpec(**SHAPE, dtype=dtype), POLICY, MAX_BLOCKS)
        impl_cls = Impl if has_stock else relay_sparse_cuda.RelaySparseCudaImpl
        builder_cls = Builder if has_stock else relay_sparse_cuda.RelaySparseCudaMetadataBuilder
        with set_current_vllm_config(config), fake_device():
            self.impl, self.sharing_impl = (
                impl_cls(
                    NUM_HEADS,
                    HEAD_SIZE,
                    HEAD_SIZE**-0.5,
                    num_kv_heads=NUM_KV_HEADS,
                    kv_sharing_target_layer_name=target,
                )
                for target in (None, "layer")
            )
            self.builder = builder_cls(spec, ["layer"], config, torch.device("cpu"))
        self.has_stock, self.has_sharing_layer = has_stock, has_sharing_layer
        self.dtype = dtype
        shape = NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, 2 * HEAD_SIZE
        # tokens first, as vLLM's own CUDA backends lay it out
        self.kv_cache = torch.full(shape, torch.nan, dtype=dtype).transpose(1, 2)
        self.kv_cache[0] = 0.0  # the null block: nobody may read it, and vLLM fills it with zeros
        self.free = list(range(1, NUM_BLOCKS))
        self.layer = SimpleNamespace(layer_name="layer", _k_scale=ONE, _v_scale=ONE)

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

    def step(
        self,
        *chunks: tuple[Sequence, int],
        placed: dict[str, Placement] | None = None,
        kept: tuple[str, ...] = (),
        lost: tuple[str, ...] = (),
    ) -> None:
        """Computes so many tokens of each sequence, and compares.

        Args:
            kept: names of those that are to become contexts.
            lost: of those whose output means nothing.
        """
        if self.has_stock:  # vLLM brings decodes to the front
            chunks = tuple(sorted(chunks, key=lambda chunk: chunk[1] > 1))
        for sequence, num_tokens in chunks:
            self.allocate(sequence, num_tokens)
        self._announce([sequence for sequence, _ in chunks], placed or {}, kept)
        ranges = [
            (each, each.num_computed_tokens, each.num_computed_tokens + count)
            for each, count in chunks
        ]
        common = self.metadata(ranges)
        given = [
            on_device(torch.cat([getattr(each, name)[start:end] for each, start, end in ranges]))
            for name in ("query", "keys", "values")
        ]
        output = on_device(torch.full_like(on_host(given[0]), torch.nan))
        kv_cache = on_device(self.kv_cache)
        before = on_host(common.block_table_tensor).clone(), on_host(common.seq_lens).clone()
        with torch.inference_mode(), fake_device():
            query, key, value = given
            metadata = self.builder.build(0, common)
            self.impl.do_kv_cache_update(self.layer, key, value, kv_cache, common.slot_mapping)
            self.impl.forward(self.layer, query, key, value, kv_cache, metadata, output)
            if self.has_sharing_layer:
                on_host(output).fill_(torch.nan)
                other = SimpleNamespace(**vars(self.layer) | {"layer_name": "other"})
                sharing: Any = self.sharing_impl
                sharing.forward(other, query, None, None, kv_cache, metadata, output)
        assert torch.equal(before[0], on_host(common.block_table_tensor))
        assert torch.equal(before[1], on_host(common.seq_lens))
        actual = on_host(output).double().clone()
        for used in (*given, output):
            on_host(used).fill_(torch.nan)
        on_host(common.block_table_tensor).fill_(1 << 30)
        first = 0
        for sequence, start, end in ranges:
            if sequence.name not in lost:
                torch.testing.assert_close(
                    actual[first : first + end - start],
                    sequence.expected(start, end),
                    atol=TOLERANCE[self.dtype],
                    rtol=0,
                )
            first += end - start
            sequence.num_computed_tokens = end

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
        found = worker.state.requests[sequence.name].sequence
        assert found is not None
        return found.layers["layer"]

    def check_copy(self, sequence: Sequence) -> None:
        """The host has all tokens that are computed once the copies have arrived."""
        worker.state.pending_writes.finish()
        own = self.own(sequence)
        assert own.end == sequence.num_computed_tokens
        keys, values = own.rows(own.begin, own.end)
        assert torch.equal(keys.transpose(0, 1), sequence.keys[own.begin : own.end])
        assert torch.equal(values.transpose(0, 1), sequence.values[own.begin : own.end])

    def allocate(self, sequence: Sequence, num_tokens: int) -> None:
        gap = POLICY.residency(
            sequence.num_computed_tokens, sequence.num_prompt_tokens, sequence.first_resident_token
        )
        gone = slice(*(each // BLOCK_SIZE for each in gap))
        if not sequence.is_new:  # it keeps what it hits for a step
            left = [block for block in sequence.blocks[gone] if block]
            sequence.blocks[gone] = [0] * len(sequence.blocks[gone])
            self.poison(left)
        while len(sequence.blocks) * BLOCK_SIZE < sequence.num_computed_tokens + num_tokens:
            sequence.blocks.append(self.free.pop(0))

    def poison(self, blocks: list[int]) -> None:
        self.kv_cache[blocks] = torch.nan
        self.free += blocks

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
            query_start_loc=on_device(query_start_loc.clone()),
            query_start_loc_cpu=query_start_loc,
            seq_lens=on_device(ends.clone()),
            seq_lens_cpu_upper_bound=ends,
            num_reqs=len(ranges),
            num_actual_tokens=sum(counts),
            max_query_len=max(counts),
            max_seq_len=int(ends.max()),
            block_table_tensor=on_device(torch.tensor(tables, dtype=torch.int32)),
            slot_mapping=on_device(torch.tensor(slots)),
            causal=True,
        )

    def _announce(
        self, sequences: list[Sequence], placed: dict[str, Placement], kept: tuple[str, ...]
    ) -> None:
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
        resumed = {name for name in placed if name not in {each.req_id for each in new}}
        output = SimpleNamespace(
            finished_req_ids=[],
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=resumed),
        )
        setattr(output, ATTRIBUTE, StepOrders(placed=placed))
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
            ),
            output,
        )
