# SPDX-License-Identifier: Apache-2.0
"""Requests as vLLM's engine core takes them, for any number of engines whose model is a stub."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from vllm import SamplingParams
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

from vllm_relay.prefix_cache.pins.pin import digest_of
from vllm_relay.prefix_cache.predict.input import PredictedRequest

_FIRST_GENERATED_TOKEN = 1 << 40  # beyond every vocabulary and every trace's hash ids


class EngineRequests:
    """Requests are known by their numbers. Equal prompts have equal answers, all others differ."""

    def __init__(self, requests: Sequence[PredictedRequest]) -> None:
        self._requests = requests
        self._prompt_hashes: dict[tuple[int, int], list[Any]] = {}  # of (hash block size, index)
        prompts: dict[str, int] = {}
        self._generated_token = [
            _FIRST_GENERATED_TOKEN + prompts.setdefault(digest_of(r.prompt_token_ids), len(prompts))
            for r in requests
        ]

    def __len__(self) -> int:
        return len(self._requests)

    def answer_by(self, core: EngineCore) -> None:
        """Let an engine's stub give these requests their tokens."""
        scheduler: Any = core.scheduler
        executor: Any = core.model_executor
        executor.sampler = lambda request_id: (
            []
            if scheduler.requests[request_id].is_prefill_chunk
            else [self._generated_token[int(request_id)]]
        )

    def request(self, number: int, core: EngineCore) -> Request:
        """A request for this engine."""
        given = self._requests[number]
        key = core.scheduler.hash_block_size, number
        return Request(
            request_id=str(number),
            prompt_token_ids=given.prompt_token_ids,
            sampling_params=SamplingParams(
                temperature=0,
                max_tokens=given.output_tokens,
                ignore_eos=True,
                detokenize=False,
            ),
            pooling_params=None,
            cache_salt=given.cache_salt,
            block_hasher=partial(self._hash_blocks, core.request_block_hasher, key),
        )

    def chains(self, hash_block_size: int, block_tokens: int) -> list[list[bytes]]:
        """Hashes of the full blocks of `block_tokens`, a multiple of the hashed blocks, of those
        prompts that were given to an engine."""
        every = block_tokens // hash_block_size
        return [
            self._prompt_hashes.get((hash_block_size, index), [])[every - 1 :: every]
            for index in range(len(self._requests))
        ]

    def _hash_blocks(
        self, hasher: Callable[[Request], list[Any]] | None, key: tuple[int, int], request: Request
    ) -> list[Any]:
        """vLLM's hashes; those of the prompts are computed once for all engines."""
        if hasher is None:
            return []
        if request.num_output_tokens:
            return hasher(request)
        if key not in self._prompt_hashes:
            self._prompt_hashes[key] = hasher(request)
        return self._prompt_hashes[key]
