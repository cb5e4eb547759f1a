# SPDX-License-Identifier: Apache-2.0
"""vLLM without its model: the engine core schedules, caches and evicts; nothing is computed.

`EngineCore` is vLLM's own, with its scheduler and its KV cache manager, in the loop that
`LLM.generate` runs in-process. Only the executor is a stub: it knows the model's layers, and every
request whose prompt is computed gets a token.
"""

from __future__ import annotations

import gc
import hashlib
import math
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from vllm import SamplingParams, envs
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import EngineArgs
from vllm.renderers import ChatParams, renderer_from_config
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

from vllm_relay.config import SCHEDULER_PATH
from vllm_relay.prefix_cache.eviction.belady import belady_hits
from vllm_relay.prefix_cache.predict_executor import StubExecutor
from vllm_relay.prefix_cache.predict_input import LineError, Message, PredictedRequest

GIB_BYTES = 1 << 30

_FIRST_GENERATED_TOKEN = 1 << 40  # beyond every vocabulary and every trace's hash ids
_MAX_IDLE_STEPS = 10_000


@dataclass(frozen=True)
class CacheSize:
    """The size of a KV cache. Where both are given, vLLM is told the blocks."""

    gib: float | None = None
    blocks: int | None = None

    def __str__(self) -> str:
        return f"{self.blocks} blocks" if self.gib is None else f"{self.gib:g} GiB"


@dataclass(frozen=True)
class PredictorSettings:
    """What the engine would be started with; None stands for vLLM's default."""

    model: str
    eviction: str | None = None
    """Policy of the relay scheduler; None schedules and evicts as vLLM does."""
    block_size: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    dtype: str | None = None

    def engine_args(self, **more: Any) -> dict[str, Any]:
        """Arguments of `vllm.LLM` that ask for the same engine."""
        args: dict[str, Any] = {"model": self.model}
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            args[name] = getattr(self, name)
        args["dtype"] = self.dtype
        if self.eviction is not None:
            args["scheduler_cls"] = SCHEDULER_PATH
            args["additional_config"] = {"relay": {"scheduler": True, "eviction": self.eviction}}
        return {name: value for name, value in (args | more).items() if value is not None}


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

    @property
    def cached_tokens(self) -> int:
        return sum(self.cached_tokens_by_request)

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens


class Predictor:
    """Predicts what the prefix cache does for a list of requests.

    Args:
        settings: of the engine.
        requests: in the order in which they are given to `LLM.generate`.
    """

    def __init__(
        self,
        settings: PredictorSettings,
        requests: Sequence[PredictedRequest],
    ) -> None:
        self.settings = settings
        self._requests = requests
        self._prompt_hashes: dict[tuple[int, int], list[Any]] = {}  # of (hash block size, index)
        prompts: dict[bytes, int] = {}
        self._generated_token = [
            # equal prompts have equal answers, all others differ
            _FIRST_GENERATED_TOKEN + prompts.setdefault(_digest(r.prompt_token_ids), len(prompts))
            for r in requests
        ]

    def predict(
        self, size: CacheSize, on_progress: Callable[[int], None] = lambda finished: None
    ) -> Prediction:
        """Run all requests through an engine whose KV cache has this size.

        Args:
            on_progress: called after every step with the number of finished requests.

        Raises:
            ValueError: vLLM refuses the settings, or a prompt is too long; the message says which.
        """
        config = create_config(self.settings, num_gpu_blocks_override=size.blocks)
        check_lengths(self._requests, config.model_config.max_model_len)
        # with blocks given, vLLM counts them and not the bytes
        available_bytes = math.floor((size.gib or 1) * GIB_BYTES)
        try:
            core = EngineCore(config, partial(StubExecutor, available_bytes=available_bytes), False)
        except ValueError as error:
            cleanup_dist_env_and_memory()
            # where blocks are given, what vLLM says of bytes is about a model that stands in
            reason = f" (vLLM: {error})" if size.blocks is None else ""
            raise ValueError(
                f"a KV cache of {size} does not hold one request of "
                f"{config.model_config.max_model_len} tokens (--max-model-len){reason}: give "
                "more, or a smaller --max-model-len"
            ) from error
        finally:
            envs.disable_envs_cache()  # this process may start other engines
        try:
            return self._run(core, size, on_progress)
        finally:
            core.shutdown()

    def _run(
        self, core: EngineCore, size: CacheSize, on_progress: Callable[[int], None]
    ) -> Prediction:
        scheduler: Any = core.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        pool.metrics_collector = evictions = _EvictionCounter()
        began_s = time.perf_counter()
        requests = self._add_requests(core)
        executor: Any = core.model_executor
        executor.sampler = self._sampler(scheduler.requests)
        cached_tokens: dict[str, int] = {}
        steps = idle_steps = finished = 0
        while scheduler.has_requests():
            outputs, computed = core.step()
            steps += computed
            idle_steps = 0 if computed else idle_steps + 1
            if idle_steps > _MAX_IDLE_STEPS:
                waiting = scheduler.get_num_unfinished_requests()
                raise ValueError(f"the scheduler runs none of {waiting} waiting requests")
            for output in outputs[0].outputs if outputs else ():
                if output.prefill_stats is not None:
                    cached_tokens[output.request_id] = output.prefill_stats.num_cached_tokens
                finished += output.finished
            on_progress(finished)
        elapsed_s = time.perf_counter() - began_s

        block_tokens = scheduler.kv_cache_config.cache_hit_alignment_tokens
        chains = self._chains(scheduler.hash_block_size, block_tokens)
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
            cached_tokens_by_request=[cached_tokens[r.request_id] for r in requests],
            ceiling_tokens=ceiling,
            belady_tokens=belady,
            evicted_blocks=evictions.blocks,
            preemptions=sum(r.num_preemptions for r in requests),
            steps=steps,
            elapsed_s=elapsed_s,
        )

    def _add_requests(self, core: EngineCore) -> list[Request]:
        """All requests before the first step, as `LLM.generate` does in-process."""
        hasher = core.request_block_hasher
        hash_block_size = core.scheduler.hash_block_size
        requests = []
        for index, given in enumerate(self._requests):
            request = Request(
                request_id=str(index),
                prompt_token_ids=given.prompt_token_ids,
                sampling_params=SamplingParams(
                    temperature=0,
                    max_tokens=given.output_tokens,
                    ignore_eos=True,
                    detokenize=False,
                ),
                pooling_params=None,
                block_hasher=partial(self._hash_blocks, hasher, (hash_block_size, index)),
            )
            core.add_request(request)
            requests.append(request)
        gc.freeze()  # core.shutdown() undoes it
        return requests

    def _hash_blocks(
        self, hasher: Callable[[Request], list[Any]] | None, key: tuple[int, int], request: Request
    ) -> list[Any]:
        """vLLM's hashes; those of the prompts are computed once for all cache sizes."""
        if hasher is None:
            return []
        if request.num_output_tokens:
            return hasher(request)
        if key not in self._prompt_hashes:
            self._prompt_hashes[key] = hasher(request)
        return self._prompt_hashes[key]

    def _chains(self, hash_block_size: int, block_tokens: int) -> list[list[bytes]]:
        """Hashes of the prompts' full blocks of `block_tokens`, a multiple of the hashed blocks."""
        every = block_tokens // hash_block_size
        return [
            self._prompt_hashes.get((hash_block_size, index), [])[every - 1 :: every]
            for index in range(len(self._requests))
        ]

    def _sampler(self, requests: dict[str, Request]) -> Callable[[str], list[int]]:
        def sample(request_id: str) -> list[int]:
            if requests[request_id].is_prefill_chunk:
                return []
            return [self._generated_token[int(request_id)]]

        return sample


class Encoder:
    """Turns prompts into token ids as `LLM.generate` and `LLM.chat` do."""

    def __init__(self, settings: PredictorSettings) -> None:
        self._renderer = renderer_from_config(create_config(settings, skip_tokenizer_init=False))

    def text(self, prompt: str) -> list[int]:
        (encoded,) = self._renderer.render_cmpl([{"prompt": prompt}])
        return encoded["prompt_token_ids"]

    def chat(self, messages: list[Message]) -> list[int]:
        params = ChatParams(chat_template_kwargs={"add_generation_prompt": True, "tokenize": False})
        tokenizing = self._renderer.default_chat_tok_params.with_kwargs(add_special_tokens=False)
        _, (encoded,) = self._renderer.render_chat([messages], params, tokenizing)
        return encoded["prompt_token_ids"]


def create_config(
    settings: PredictorSettings, *, skip_tokenizer_init: bool = True, **more: Any
) -> VllmConfig:
    """The configuration that `LLM` makes of these settings.

    Raises:
        ValueError, OSError: there is no such model, or vLLM refuses a setting.
    """
    args = settings.engine_args(
        skip_tokenizer_init=skip_tokenizer_init,
        enforce_eager=True,  # like load_format, no bearing on the scheduler
        load_format="dummy",
        async_scheduling=False,
        disable_log_stats=True,
        **more,
    )
    return EngineArgs(**args).create_engine_config(UsageContext.LLM_CLASS)


def check_lengths(requests: Sequence[PredictedRequest], max_model_len: int) -> None:
    """Refuse prompts that vLLM refuses: an answer must have room for a token.

    Raises:
        LineError: the first such line.
    """
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
    be the one that computes it for the others.

    Args:
        chains: hashes of the full blocks of each prompt.
        prompts_tokens: length of each prompt.
        block_tokens: tokens of a block.
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


def _digest(token_ids: list[int]) -> bytes:
    return hashlib.sha256(array("q", token_ids).tobytes()).digest()


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
