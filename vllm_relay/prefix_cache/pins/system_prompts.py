# SPDX-License-Identifier: Apache-2.0
"""Pinning the prompts of ``additional_config.relay.system_prompts`` when an engine starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm_relay.commands.at_start import check_texts, keep_texts, keep_texts_async, once
from vllm_relay.commands.engine import call, call_async
from vllm_relay.commands.owners import CONFIGURATION
from vllm_relay.config import scheduler_is_selected
from vllm_relay.prefix_cache.pins.client import Declaration, Pin, pin_tokens, pin_tokens_async

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_relay.config import RelayConfig


def pin_system_prompts(engine: Any) -> None:
    """Pin ``additional_config.relay.system_prompts`` in an LLMEngine, or raise a ValueError."""

    def pin(number: int, token_ids: list[int]) -> Pin:
        return pin_tokens(engine, _declaration(number, token_ids))

    if pins := keep_texts(engine, "system_prompts", pin):
        _log(pins, call(engine, "gauges", {}))


async def pin_system_prompts_async(engine: Any, online_renderer: Any = None) -> None:
    """:func:`pin_system_prompts` for an AsyncLLM, before its first request.

    The first call pins, whether it is cancelled or not; all others wait for it and share its error.

    Args:
        online_renderer: the server's OnlineRenderer, which knows its chat template; without one it
            is the tokenizer's.
    """

    async def pin(number: int, token_ids: list[int]) -> Pin:
        return await pin_tokens_async(engine, _declaration(number, token_ids))

    async def pin_all() -> None:
        if pins := await keep_texts_async(engine, online_renderer, "system_prompts", pin):
            _log(pins, await call_async(engine, "gauges", {}))

    await once(engine, "relay_pinning", pin_all)


def _declaration(number: int, token_ids: list[int]) -> Declaration:
    return Declaration(token_ids, f"system-{number}", owner=CONFIGURATION)


def _log(pins: Sequence[Pin], gauges: dict[str, int]) -> None:
    from vllm.logger import init_logger

    init_logger("vllm.relay").info(
        "vllm-relay: pinned system prompts: %d, tokens: %s, KV blocks: %s, bytes in one worker: %s",
        len(pins),
        f"{sum(pin.tokens for pin in pins):,}",
        f"{gauges['pinned_blocks']:,}",
        f"{gauges['pinned_bytes']:,}",
    )


def check_system_prompts(vllm_config: VllmConfig, options: RelayConfig) -> None:
    """Refuse ``system_prompts``, by a ValueError, that no engine of this configuration can pin."""
    model_config = vllm_config.model_config
    runner = "generate" if model_config is None else model_config.runner_type
    check_texts(
        vllm_config,
        "system_prompts",
        options.system_prompts,
        (
            scheduler_is_selected(vllm_config),
            "RelayScheduler, which pins them: set additional_config.relay.scheduler true",
        ),
        (runner == "generate", f"a model that generates, given --runner {runner}"),
        instead="pin token ids with vllm_relay.prefix_cache.pin",
    )
