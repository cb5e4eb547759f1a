# SPDX-License-Identifier: Apache-2.0
"""Prompts run through vLLM's own KVCacheManager, without a model."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
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
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from vllm_relay.prefix_cache.pins.table import PinTable
from vllm_relay.prefix_cache.stats import PrefixCacheRecorder

HAS_LOOKAHEAD_HASHES = "num_hash_lookahead_tokens" in inspect.signature(KVCacheManager).parameters
"""Whether this vLLM hashes a block with tokens behind it that a draft reads: from 0.33 on."""

BLOCK_SIZE = 4
MAX_MODEL_LEN = 40
BLOCK_BYTES = 512


class Scheduler:
    """What a PinTable needs of one, and prompts run through it.

    Args:
        use_eagle: lookups leave out the last block that they find, whose draft would be a guess.
        lookahead_tokens: behind each block, that its hash covers.
    """

    def __init__(
        self,
        num_blocks: int = 31,
        sliding_window: int | None = None,
        use_eagle: bool = False,
        lookahead_tokens: int = 0,
        max_pinned_fraction: float = 1.0,
    ) -> None:
        init_none_hash(sha256)
        shape: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 16}
        shape["dtype"] = torch.float32
        specs = [KVCacheGroupSpec(["full"], FullAttentionSpec(**shape))]
        if sliding_window is not None:
            spec = SlidingWindowSpec(**shape, sliding_window=sliding_window)
            specs.append(KVCacheGroupSpec(["window"], spec))
        self._lookahead = (lookahead_tokens,) if lookahead_tokens else ()
        options = {"num_hash_lookahead_tokens": lookahead_tokens} if lookahead_tokens else {}
        self.kv_cache_manager = KVCacheManager(
            KVCacheConfig(
                num_blocks=num_blocks,
                kv_cache_tensors=[
                    KVCacheTensor(num_blocks * BLOCK_BYTES, [name], 0, BLOCK_BYTES)
                    for name in ("full", "window")
                ],
                kv_cache_groups=specs,
            ),
            max_model_len=MAX_MODEL_LEN,
            scheduler_block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
            use_eagle=use_eagle,
            **options,
        )
        self.max_model_len = MAX_MODEL_LEN
        self.block_size = BLOCK_SIZE
        self.running: list[Request] = []
        self.waiting = SimpleNamespace(held_requests=0, leading_requests=0, blocked_requests=0)
        self.overtaken = SimpleNamespace(count=0)
        self.now_s = 0.0
        self.pins = PinTable(self, max_pinned_fraction, lambda: self.now_s)
        self.relay_recorder = PrefixCacheRecorder(self)
        self._requests = 0

    @property
    def num_free(self) -> int:
        return self.kv_cache_manager.block_pool.get_num_free_blocks()

    def request(self, token_ids: list[int], pin_id: str | None = None, **kwargs: Any) -> Request:
        self._requests += 1
        extra_args = {"relay_pin": pin_id} if pin_id is not None else None
        params = SamplingParams(max_tokens=1, extra_args=extra_args)
        return Request(
            request_id=str(self._requests),
            prompt_token_ids=token_ids,
            sampling_params=params,
            pooling_params=None,
            block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256, *self._lookahead),
            **kwargs,
        )

    def prefill(self, request: Request, num_tokens: int | None = None) -> int:
        """Compute tokens of a request; all by default. Returns how many were cached."""
        cached, num_cached, *_ = self.kv_cache_manager.get_computed_blocks(request)
        num_new = (num_tokens or request.num_tokens) - num_cached
        slots = self.kv_cache_manager.allocate_slots(request, num_new, num_cached, cached)
        assert slots is not None
        request.num_computed_tokens = num_cached + num_new
        return num_cached

    def free(self, request: Request) -> None:
        self.pins.before_free(request)
        self.kv_cache_manager.free(request)

    def run(self, token_ids: list[int], pin_id: str | None = None, **kwargs: Any) -> int:
        request = self.request(token_ids, pin_id, **kwargs)
        cached = self.prefill(request)
        self.free(request)
        return cached

    def pin(self, pin_id: str, token_ids: list[int], **declaration: Any) -> dict[str, Any]:
        num_tokens = self.pins.declare(pin_id, token_ids, **declaration)["prompt_tokens"]
        self.run(token_ids[:num_tokens], pin_id)
        return self.entry(pin_id)

    def entry(self, pin_id: str) -> dict[str, Any]:
        [entry] = [each for each in self.pins.entries() if each["id"] == pin_id]
        return entry

    def flood(self) -> None:
        """Use every free block for something else."""
        pool = self.kv_cache_manager.block_pool
        pool.free_blocks(pool.get_new_blocks(pool.get_num_free_blocks()))

    def reset(self) -> bool:
        self.pins.reset()
        return self.kv_cache_manager.reset_prefix_cache()


def tokens(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))
