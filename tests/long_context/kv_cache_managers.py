# SPDX-License-Identifier: Apache-2.0
"""Requests run through vLLM's own KVCacheManager, without a model."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.request import Request

from vllm_relay.long_context.scheduling.kv_cache_spec import RelaySparseSpec
from vllm_relay.long_context.window import WindowPolicy

BLOCK_SIZE = 4
MAX_MODEL_LEN = 400
SHAPE: dict[str, Any] = {
    "block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 16, "dtype": torch.float32
}  # fmt: skip
POLICY = WindowPolicy(
    block_size_tokens=BLOCK_SIZE,
    sink_tokens=6,
    window_tokens=21,
    min_context_tokens=50,
    prefill="exact_offload",
)


def spec_of(policy: WindowPolicy = POLICY, max_in_flight_tokens: int = 30) -> RelaySparseSpec:
    max_blocks = policy.max_blocks(MAX_MODEL_LEN, max_in_flight_tokens)
    return RelaySparseSpec.of(FullAttentionSpec(**SHAPE), policy, max_blocks)


class Blocks:
    """A KVCacheManager of one group, and requests that take blocks of it."""

    def __init__(self, spec: RelaySparseSpec, num_blocks: int, enable_caching: bool = True) -> None:
        init_none_hash(sha256)
        tensors = [KVCacheTensor(num_blocks * spec.page_size_bytes, ["a"], 0, spec.page_size_bytes)]
        self.manager = KVCacheManager(
            KVCacheConfig(num_blocks, tensors, [KVCacheGroupSpec(["a"], spec)]),
            max_model_len=MAX_MODEL_LEN,
            scheduler_block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
            enable_caching=enable_caching,
        )
        self.spec = spec
        self.pool = self.manager.block_pool
        self._ids = itertools.count()

    @property
    def num_free(self) -> int:
        return self.pool.get_num_free_blocks()

    def request(self, token_ids: list[int]) -> Request:
        return Request(
            request_id=str(next(self._ids)),
            prompt_token_ids=token_ids,
            sampling_params=SamplingParams(max_tokens=MAX_MODEL_LEN),
            pooling_params=None,
            block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
        )

    def begin(self, request: Request, num_tokens: int) -> int | None:
        """Schedules the first tokens of a request; returns how many were in the prefix cache, and
        None if there is no room."""
        cached, num_cached, _ = self.manager.get_computed_blocks(request)
        num_new = min(num_tokens, request.num_tokens - num_cached)
        slots = self.manager.allocate_slots(
            request, num_new, num_cached, cached, full_sequence_must_fit=True
        )
        if slots is None:
            return None
        request.num_computed_tokens = num_cached + num_new
        request.num_in_flight_tokens = num_new
        return num_cached

    def go_on(self, request: Request, num_tokens: int) -> bool:
        """Schedules tokens; whether there was room."""
        if self.manager.allocate_slots(request, num_tokens) is None:
            return False
        request.num_computed_tokens += num_tokens
        request.num_in_flight_tokens += num_tokens
        return True

    def run(self, request: Request, chunk_tokens: int) -> None:
        """Computes what there is of a request, step by step."""
        if request.num_computed_tokens == 0:
            assert self.begin(request, chunk_tokens) is not None
        request.num_in_flight_tokens = 0
        while num_left := request.num_tokens - request.num_computed_tokens:
            assert self.go_on(request, min(chunk_tokens, num_left))
            request.num_in_flight_tokens = 0

    def table(self, request: Request) -> list[int]:
        """Block ids; 0 is the null block."""
        (ids,) = self.manager.get_block_ids(request.request_id)
        return ids

    def check_all_are_free(self) -> None:
        """No block is lost, and none is there twice."""
        free = [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]
        assert sorted(free) == list(range(1, self.pool.num_gpu_blocks))
        assert all(not block.ref_cnt for block in self.pool.blocks[1:])
        assert self.num_free == self.pool.num_gpu_blocks - 1
