# SPDX-License-Identifier: Apache-2.0
"""Pinning the prompts of ``additional_config.relay.system_prompts`` when an engine starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm_relay.commands.at_start import (
    naming_the_option,
    once,
    read_texts,
    system_prompt_tokens,
    system_prompt_tokens_async,
)
from vllm_relay.commands.engine import call, call_async
from vllm_relay.commands.owners import CONFIGURATION
from vllm_relay.config import RelayConfig, scheduler_is_selected
from vllm_relay.prefix_cache.pins.client import Pin, pin_tokens, pin_tokens_async

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def pin_system_prompts(engine: Any) -> None:
    """Pin ``additional_config.relay.system_prompts`` in an LLMEngine.

    Raises:
        ValueError: one cannot be pinned.
    """
    pins = []
    for number, text in enumerate(_system_prompts(engine.vllm_config)):
        with naming_the_option("system_prompts", number):
            token_ids = system_prompt_tokens(engine, text)
            pins.append(pin_tokens(engine, token_ids, f"system-{number}", owner=CONFIGURATION))
    if pins:
        _log_system_prompts(pins, call(engine, "size", {}))


async def pin_system_prompts_async(engine: Any, online_renderer: Any = None) -> None:
    """Pin ``additional_config.relay.system_prompts`` in an AsyncLLM.

    The first call pins, whether it is cancelled or not; all others wait for it and share its error.
    The requests that compute the prompts do not wait.

    Args:
        engine: an AsyncLLM.
        online_renderer: the server's OnlineRenderer, which knows its chat template; without one it
            is the tokenizer's.

    Raises:
        ValueError: one cannot be pinned.
    """
    await once(engine, "relay_pinning", lambda: _pin_async(engine, online_renderer))


async def _pin_async(engine: Any, online_renderer: Any) -> None:
    pins = []
    for number, text in enumerate(_system_prompts(engine.vllm_config)):
        with naming_the_option("system_prompts", number):
            token_ids = await system_prompt_tokens_async(engine, online_renderer, text)
            pin_id = f"system-{number}"
            pins.append(await pin_tokens_async(engine, token_ids, pin_id, owner=CONFIGURATION))
    if pins:
        _log_system_prompts(pins, await call_async(engine, "size", {}))


def _system_prompts(vllm_config: VllmConfig) -> list[str]:
    options = RelayConfig.from_vllm_config(vllm_config)
    return read_texts("system_prompts", options.system_prompts)


def _log_system_prompts(pins: Sequence[Pin], size: dict[str, int]) -> None:
    from vllm.logger import init_logger

    init_logger("vllm.relay").info(
        "vllm-relay: pinned system prompts: %d, tokens: %s, KV blocks: %s, bytes in one worker: %s",
        len(pins),
        f"{sum(pin.tokens for pin in pins):,}",
        f"{size['blocks']:,}",
        f"{size['bytes']:,}",
    )


def check_system_prompts(vllm_config: VllmConfig, options: RelayConfig) -> None:
    """Refuse ``system_prompts`` that no engine of this configuration can pin.

    Raises:
        ValueError: with the reason and the way out.
    """
    if not options.system_prompts:
        return
    read_texts("system_prompts", options.system_prompts)
    model_config = vllm_config.model_config
    reason = None
    if not scheduler_is_selected(vllm_config):
        reason = "RelayScheduler, which pins them: set additional_config.relay.scheduler true"
    elif not vllm_config.cache_config.enable_prefix_caching:
        reason = "prefix caching: set --enable-prefix-caching"
    elif model_config is not None and model_config.runner_type != "generate":
        reason = f"a model that generates, given --runner {model_config.runner_type}"
    elif model_config is not None and model_config.skip_tokenizer_init:
        reason = (
            "a tokenizer: remove --skip-tokenizer-init, or pin token ids with "
            "vllm_relay.prefix_cache.pin"
        )
    if reason is not None:
        raise ValueError(f"additional_config.relay.system_prompts needs {reason}")
