# SPDX-License-Identifier: Apache-2.0
"""The engine whose scheduler and KV cache are predicted: vLLM's engine core, its model a stub."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from vllm import envs
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.core import EngineCore

from vllm_relay.config import SCHEDULER_PATH
from vllm_relay.prefix_cache.predict.executor import StubExecutor

GIB_BYTES = 1 << 30

_MAX_GIB = 16384
_MAX_BLOCKS = 10_000_000  # they take half a minute and some GB to make


@dataclass(frozen=True)
class CacheSize:
    """The size of a KV cache. Where both are given, vLLM is told the blocks."""

    gib: float | None = None
    blocks: int | None = None

    def __str__(self) -> str:
        return f"{self.blocks} blocks" if self.gib is None else f"{self.gib:g} GiB"


def cache_sizes(
    gib: Sequence[float],
    blocks: Sequence[int],
    block_size: int | None,
    kv_bytes_per_token: int | None,
) -> list[CacheSize]:
    """The sizes that are asked for, the smallest first, those in GiB before those in blocks.

    Args:
        block_size: tokens of a block, or None; GiB become blocks where this is known, and
            `kv_bytes_per_token`, the bytes of a token in all layers.

    Raises:
        ValueError: a size is none, or too much.
    """
    sizes = []
    for size in gib:
        if not 0 < size <= _MAX_GIB:
            raise ValueError(f"a KV cache of {size} GiB: expected more than 0, at most {_MAX_GIB}")
        count = None
        if kv_bytes_per_token is not None and block_size is not None:
            count = math.floor(size * GIB_BYTES / (kv_bytes_per_token * block_size))
        sizes.append(CacheSize(size, count))
    sizes += [CacheSize(blocks=count) for count in sorted(set(blocks))]
    if any(count < 1 for count in blocks):
        raise ValueError(f"a KV cache of {min(blocks)} blocks: expected more than 0")
    for each in sizes:
        if each.blocks is not None and each.blocks > _MAX_BLOCKS:
            raise ValueError(
                f"a KV cache of {each.blocks} blocks: expected at most {_MAX_BLOCKS}; where all "
                "requests fit, more changes nothing"
            )
    return sizes


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
    relay: Mapping[str, Any] = field(default_factory=dict)
    """More options of the relay scheduler, as in ``additional_config["relay"]``."""

    def engine_args(self, **more: Any) -> dict[str, Any]:
        """Arguments of `vllm.LLM` that ask for the same engine."""
        names = ("model", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len")
        args = {name: getattr(self, name) for name in (*names, "dtype")}
        if self.eviction is not None:
            relay = {"scheduler": True, "eviction": self.eviction, **self.relay}
            args |= {"scheduler_cls": SCHEDULER_PATH, "additional_config": {"relay": relay}}
        return {name: value for name, value in (args | more).items() if value is not None}

    def of_scheduler(self, scheduler: str) -> PredictorSettings:
        """The same engine with this scheduler, stock or the relay scheduler that is set."""
        return replace(self, eviction=None, relay={}) if scheduler == "stock" else self


def create_config(
    settings: PredictorSettings,
    *,
    online: bool = False,
    skip_tokenizer_init: bool = True,
    **more: Any,
) -> VllmConfig:
    """The configuration that `LLM`, or with `online` the server, makes of these settings.

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
    context = UsageContext.OPENAI_API_SERVER if online else UsageContext.LLM_CLASS
    return EngineArgs(**args).create_engine_config(context)


def create_core(config: VllmConfig, size: CacheSize) -> EngineCore:
    """An engine core in this process with a KV cache of this size; the caller shuts it down.

    Raises:
        ValueError: the KV cache does not hold one request of the longest length.
    """
    config.cache_config.num_gpu_blocks_override = size.blocks
    # with blocks given, vLLM counts them and not the bytes
    available_bytes = math.floor((size.gib or 1) * GIB_BYTES)
    try:
        return EngineCore(config, partial(StubExecutor, available_bytes=available_bytes), False)
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


def shut_down(cores: Sequence[EngineCore]) -> None:
    """End engine cores of this process: what they share, once, which looks through the whole heap
    for garbage."""
    for core in cores[1:]:
        core.model_executor.shutdown()
        core.scheduler.shutdown()
    for core in cores[:1]:
        core.shutdown()
