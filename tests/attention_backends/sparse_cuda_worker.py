# SPDX-License-Identifier: Apache-2.0
"""A worker with one layer of RELAY_SPARSE on a fake GPU, beside a stock backend that computes
prompts with the reference. Blocks that left the device, and all that was never written, hold NaN,
and so does what vLLM handed to a layer once that has returned: a CUDA graph may use it again."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config

from tests.attention_backends import sparse_worker
from tests.attention_backends.fake_device import (
    DelayedCopies,
    DeviceTensor,
    fake_device,
    on_device,
    on_host,
)
from tests.attention_backends.sparse_worker import (
    BLOCK_SIZE,
    HEAD_SIZE,
    MAX_BLOCKS,
    MAX_MODEL_LEN,
    NUM_BLOCKS,
    NUM_HEADS,
    NUM_KV_HEADS,
    TOLERANCE,
    Sequence,
)
from tests.attention_backends.stock_cuda import StockBuilder, StockImpl
from tests.attention_backends.told_blocks import tell
from vllm_relay.attention_backends.sparse import cuda
from vllm_relay.long_context.host import worker
from vllm_relay.long_context.orders import Placement

POLICY = replace(sparse_worker.POLICY, prefill="exact_resident")
MAX_NUM_SEQS = 8
ONE = on_device(torch.ones(1))


class Builder(cuda.RelaySparseCudaMetadataBuilder):
    stock_builder_cls = StockBuilder


class Impl(cuda.RelaySparseCudaImpl):
    stock_impl_cls = StockImpl


class CudaWorker(sparse_worker.Worker):
    """The backend for CUDA.

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
        shape = NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, 2 * HEAD_SIZE
        # tokens first, as vLLM's own CUDA backends lay it out
        kv_cache = torch.full(shape, torch.nan, dtype=dtype).transpose(1, 2)
        kv_cache[0] = 0.0  # the null block: nobody may read it, and vLLM fills it with zeros
        super().__init__(POLICY, kv_cache, options)
        config: Any = self.config
        config.model_config = SimpleNamespace(max_model_len=MAX_MODEL_LEN)
        config.scheduler_config.max_num_seqs = MAX_NUM_SEQS
        config.scheduler_config.max_num_batched_tokens = 300
        config.compilation_config.cudagraph_capture_sizes = []
        config.cache_config.num_gpu_blocks = NUM_BLOCKS
        config.cache_config.block_size = BLOCK_SIZE
        impl_cls = Impl if has_stock else cuda.RelaySparseCudaImpl
        builder_cls = Builder if has_stock else cuda.RelaySparseCudaMetadataBuilder
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
            self.builder = builder_cls(
                self.spec(MAX_BLOCKS), ["layer"], config, torch.device("cpu")
            )
        self.has_stock, self.has_sharing_layer = has_stock, has_sharing_layer
        self.layer = SimpleNamespace(layer_name="layer", _k_scale=ONE, _v_scale=ONE)

    @classmethod
    def begin_process(cls, monkeypatch: pytest.MonkeyPatch) -> None:
        super().begin_process(monkeypatch)
        monkeypatch.setattr(worker, "lost_in_any_rank", lambda lost: lost)
        copies = functools.partial(DelayedCopies, tensor_cls=DeviceTensor)
        monkeypatch.setattr(cuda, "make_copies", copies)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return on_device(tensor)

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
        placed = placed or {}
        self.announce([each for each, _ in chunks], placed.keys(), kept, placed=placed)
        ranges = [
            (each, each.num_computed_tokens, each.num_computed_tokens + count)
            for each, count in chunks
        ]
        common = self.metadata(ranges)
        table, lens = on_host(common.block_table_tensor), common.seq_lens_cpu_upper_bound
        assert lens is not None
        tell(self.builder.worker_blocks, table.numpy(), lens.numpy(), BLOCK_SIZE)
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
