# SPDX-License-Identifier: Apache-2.0
"""What an engine does with a list of requests: their hits, and with arrivals their waits.

`EngineCore` is vLLM's own, with its scheduler and its KV cache manager. Only the executor is a
stub: it knows the model's layers, and every request whose prompt is computed gets a token.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.renderers import ChatParams, renderer_from_config
from vllm.v1.engine.core import EngineCore

from vllm_relay.prefix_cache.eviction.belady import belady_hits
from vllm_relay.prefix_cache.predict.engine import (
    CacheSize,
    PredictorSettings,
    create_config,
    create_core,
)
from vllm_relay.prefix_cache.predict.input import (
    InputLine,
    LineError,
    Message,
    PredictedRequest,
    check_vocabulary,
    to_requests,
)
from vllm_relay.prefix_cache.predict.load import Load
from vllm_relay.prefix_cache.predict.requests import EngineRequests
from vllm_relay.prefix_cache.predict.step_costs import StepCosts
from vllm_relay.prefix_cache.predict.virtual_time import Course, VirtualServer


@dataclass(frozen=True)
class Waits:
    """How long the requests wait, in seconds of the virtual clock."""

    first_token_s: list[float]
    """From the arrival of each request to its first token."""
    longest_s: float
    """From an arrival to the step in which the request first runs."""
    duration_s: float
    """From the first arrival to the last token."""

    @property
    def requests_per_s(self) -> float:
        return len(self.first_token_s) / self.duration_s

    def first_token_percentile_s(self, percent: float) -> float:
        return float(np.percentile(self.first_token_s, percent))

    @classmethod
    def of(cls, courses: Sequence[Course], now_s: float) -> Waits:
        return cls(
            [course.first_token_after_s(now_s) for course in courses],
            max(course.waited_s(now_s) for course in courses),
            now_s - courses[0].arrived_s,
        )


@dataclass(frozen=True)
class Prediction:
    """What a cache of one size does for the requests.

    Tokens count once per request: what is computed again after a preemption is no hit.
    """

    size: CacheSize
    num_blocks: int
    """As vLLM counts them: it keeps one back."""
    block_size_tokens: int
    prompt_tokens: int
    cached_tokens_by_request: list[int]
    ceiling_tokens: int
    """Cached tokens with an unlimited cache, in the best order."""
    belady_tokens: int | None
    """Cached tokens with this cache if the requests ran one at a time, in the order in which they
    did begin, and the block that is needed last left first. None for models with several kinds of
    KV cache."""
    evicted_blocks: int
    preemptions: int
    steps: int
    elapsed_s: float = field(compare=False)
    waits: Waits | None = None
    """None where it is not said what a step takes."""

    @property
    def cached_tokens(self) -> int:
        return sum(self.cached_tokens_by_request)

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens


class Predictor:
    """Predicts what the prefix cache does for requests, in the order in which they are given to
    `LLM.generate`."""

    def __init__(self, settings: PredictorSettings, requests: Sequence[PredictedRequest]) -> None:
        self.settings = settings
        self._requests = requests
        self._engine_requests = EngineRequests(requests)

    def predict(
        self,
        size: CacheSize,
        on_progress: Callable[[int], None] = lambda finished: None,
        load: Load | None = None,
    ) -> Prediction:
        """Run all requests through an engine whose KV cache has this size.

        Args:
            on_progress: called after every step with the number of finished requests.
            load: when requests arrive and what a step takes; None gives all to `LLM.generate`, and
                says nothing of waits.

        Raises:
            ValueError: vLLM refuses the settings, or a prompt is too long; the message says which.
        """
        config = create_config(
            self.settings, online=load is not None and load.arrivals_s is not None
        )
        check_lengths(self._requests, config.model_config.max_model_len)
        core = create_core(config, size)
        try:
            return self._run(core, size, on_progress, load)
        finally:
            core.shutdown()

    def _run(
        self,
        core: EngineCore,
        size: CacheSize,
        on_progress: Callable[[int], None],
        load: Load | None,
    ) -> Prediction:
        scheduler: Any = core.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        pool.metrics_collector = evictions = _EvictionCounter()
        began_s = time.perf_counter()
        executor: Any = core.model_executor
        self._engine_requests.answer_by(core)
        requests = [
            self._engine_requests.request(number, core) for number in range(len(self._requests))
        ]
        # LLM.generate in-process gives the engine all requests before the first step
        at_once = [0.0] * len(requests)
        server = VirtualServer(core, StepCosts(0.0, 0.0) if load is None else load.costs)
        arrivals_s = at_once if load is None else load.arrivals_s or at_once
        server.serve(requests, arrivals_s, on_progress=on_progress)
        elapsed_s = time.perf_counter() - began_s

        courses = list(server.courses.values())
        block_tokens = scheduler.kv_cache_config.cache_hit_alignment_tokens
        chains = self._engine_requests.chains(scheduler.hash_block_size, block_tokens)
        prompts_tokens = [r.num_prompt_tokens for r in requests]
        ceiling = ceiling_tokens(chains, prompts_tokens, block_tokens)
        belady = None
        if len(scheduler.kv_cache_config.kv_cache_groups) == 1:
            as_run = [chains[int(request_id)] for request_id in executor.begun]
            belady = min(ceiling, belady_hits(as_run, pool.num_gpu_blocks - 1) * block_tokens)
        return Prediction(
            size=size,
            num_blocks=pool.num_gpu_blocks,
            block_size_tokens=block_tokens,
            prompt_tokens=sum(prompts_tokens),
            cached_tokens_by_request=[course.cached_tokens for course in courses],
            ceiling_tokens=ceiling,
            belady_tokens=belady,
            evicted_blocks=evictions.blocks,
            preemptions=sum(r.num_preemptions for r in requests),
            steps=server.steps,
            elapsed_s=elapsed_s,
            waits=None if load is None else Waits.of(courses, server.now_s),
        )


def encode(
    lines: Sequence[InputLine], settings: PredictorSettings, output_tokens: int | None
) -> list[PredictedRequest]:
    """The requests that `LLM.generate` and `LLM.chat` make of the lines."""
    check_vocabulary(lines, create_config(settings).model_config.get_vocab_size())
    if all(line.token_ids is not None for line in lines):
        return to_requests(lines, output_tokens)
    renderer = renderer_from_config(create_config(settings, skip_tokenizer_init=False))
    params = ChatParams(chat_template_kwargs={"add_generation_prompt": True, "tokenize": False})
    tokenizing = renderer.default_chat_tok_params.with_kwargs(add_special_tokens=False)

    def encode_text(prompt: str) -> list[int]:
        (encoded,) = renderer.render_cmpl([{"prompt": prompt}])
        return encoded["prompt_token_ids"]

    def encode_chat(messages: list[Message]) -> list[int]:
        _, (encoded,) = renderer.render_chat([messages], params, tokenizing)
        return encoded["prompt_token_ids"]

    return to_requests(lines, output_tokens, encode_text, encode_chat)


def check_lengths(requests: Sequence[PredictedRequest], max_model_len: int) -> None:
    """Refuse prompts that vLLM refuses, by the LineError of the first: an answer needs a token."""
    for request in requests:
        tokens = len(request.prompt_token_ids)
        if tokens >= max_model_len:
            raise LineError(
                request.line,
                f"given a prompt of {tokens} tokens, expected fewer than the {max_model_len} of "
                "--max-model-len: raise it, or shorten the prompt",
            )


def ceiling_tokens(
    chains: Sequence[Sequence[bytes]], prompts_tokens: Sequence[int], block_tokens: int
) -> int:
    """Cached tokens of all prompts with an unlimited cache, in the best order.

    Every block is computed by one request and found by the others. The last token of a prompt is
    always computed, and with it its block; a request for which a block is that block may as well
    be the one that computes it for the others. `chains` are the hashes of the full blocks.
    """
    finders: dict[bytes, int] = defaultdict(int)
    ends: set[bytes] = set()
    for chain, tokens in zip(chains, prompts_tokens, strict=True):
        usable = (tokens - 1) // block_tokens
        for block in chain[:usable]:
            finders[block] += 1
        ends.update(chain[usable:])
    hits = sum(count if block in ends else count - 1 for block, count in finders.items())
    return hits * block_tokens


class _EvictionCounter:
    """Counts the cached blocks whose place is taken; vLLM's pool reports to it."""

    def __init__(self) -> None:
        self.blocks = 0

    def on_block_allocated(self, block: Any) -> None:
        pass

    def on_block_accessed(self, block: Any) -> None:
        pass

    def on_block_evicted(self, block: Any) -> None:
        self.blocks += block.block_hash is not None
