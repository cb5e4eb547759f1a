# SPDX-License-Identifier: Apache-2.0
"""Stands for vLLM's own CUDA backend: prompts are computed with the reference."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from tests.attention_backends.fake_device import on_host
from vllm_relay.attention_backends import reference
from vllm_relay.attention_backends.cuda.kernels import kv_cache as triton_kv_cache


class StockBuilder:
    def __init__(self, *args: Any) -> None: ...

    def build(self, prefix: int, common: CommonAttentionMetadata, fast_build: bool) -> Any:
        return common


class StockImpl:
    def __init__(
        self, num_heads: int, head_size: int, scale: float, *args: Any, **kwargs: Any
    ) -> None:
        self.scale = scale

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None: ...

    def do_kv_cache_update(self, layer: Any, *tensors: torch.Tensor) -> None:
        key, value, kv_cache, slots = tensors
        triton_kv_cache.write_kv_cache(key, value, kv_cache, slots, layer._k_scale, layer._v_scale)

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, common: Any, output: Any
    ) -> None:
        assert len(query) == len(key) == len(value) == len(output) == common.num_actual_tokens
        assert common.query_start_loc_cpu.tolist() == on_host(common.query_start_loc).tolist()
        attend(query, kv_cache, common, output, scale=self.scale)


def attend(query: Any, kv_cache: Any, common: Any, out: Any, **features: Any) -> None:
    """The float64 reference over a cache with each token's key before its value."""
    keys, values = on_host(kv_cache).chunk(2, dim=-1)
    reference.relay_attention(
        on_host(query),
        reference.pack_kv_cache(keys.contiguous(), values.contiguous()),
        on_host(common.block_table_tensor).int(),
        on_host(common.query_start_loc),
        on_host(common.seq_lens),
        num_kv_heads=kv_cache.shape[1],
        out=on_host(out),
        **features,
    )
