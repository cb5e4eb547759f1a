# SPDX-License-Identifier: Apache-2.0
"""Pinning the prompts of ``additional_config.relay.system_prompts`` when an engine starts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vllm_relay.prefix_cache.pin_client import (
    Pin,
    command,
    command_async,
    conversation_tokens_async,
    pin_tokens,
    pin_tokens_async,
    text_tokens_async,
    tokens_of,
)
from vllm_relay.prefix_cache.pins import PinError
from vllm_relay.prefix_cache.prompts import read_texts

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def pin_system_prompts(engine: Any) -> None:
    """Pin ``additional_config.relay.system_prompts`` in an LLMEngine.

    Raises:
        ValueError: one cannot be pinned.
    """
    pins = []
    for number, text in enumerate(_system_prompts(engine.vllm_config)):
        with _naming_the_option(number):
            token_ids = system_prompt_tokens(engine, text)
            pins.append(pin_tokens(engine, token_ids, f"system-{number}"))
    if pins:
        _log_system_prompts(pins, command(engine, "size", {}))


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
    pinning = getattr(engine, "relay_pinning", None)
    if pinning is None:
        pinning = asyncio.create_task(_pin_system_prompts_async(engine, online_renderer))
        engine.relay_pinning = pinning
    if pinning is not asyncio.current_task():
        await asyncio.shield(pinning)


async def _pin_system_prompts_async(engine: Any, online_renderer: Any) -> None:
    pins = []
    for number, text in enumerate(_system_prompts(engine.vllm_config)):
        with _naming_the_option(number):
            token_ids = await system_prompt_tokens_async(engine, online_renderer, text)
            pins.append(await pin_tokens_async(engine, token_ids, f"system-{number}"))
    if pins:
        _log_system_prompts(pins, await command_async(engine, "size", {}))


async def system_prompt_tokens_async(engine: Any, online_renderer: Any, text: str) -> list[int]:
    """:func:`system_prompt_tokens` for an AsyncLLM, with the chat template of its server."""
    if online_renderer is None:
        return system_prompt_tokens(engine, text)
    if _has_chat_template(engine.renderer, online_renderer.chat_template):
        messages = [{"role": "system", "content": text}]
        return await conversation_tokens_async(online_renderer, messages)
    return await text_tokens_async(engine.renderer, text)


def system_prompt_tokens(engine: Any, text: str) -> list[int]:
    """The tokens with which prompts begin whose system prompt is, or begins with, ``text``; of a
    model without a chat template, those that begin with it.

    Raises:
        PinError: they cannot be found.
    """
    if _has_chat_template(engine.renderer, None):
        return tokens_of(engine, [{"role": "system", "content": text}])
    return tokens_of(engine, text)


def _has_chat_template(renderer: Any, chat_template: str | None) -> bool:
    """Whether a chat template is given, or the tokenizer or vLLM has one for this model."""
    from vllm.renderers.hf import HfRenderer, resolve_chat_template

    if chat_template is not None or not isinstance(renderer, HfRenderer):
        return True  # the renderers of other tokenizers have one built in
    found = resolve_chat_template(
        renderer.get_tokenizer(), None, None, model_config=renderer.model_config
    )
    return found is not None


def _system_prompts(vllm_config: VllmConfig) -> list[str]:
    from vllm_relay.config import RelayConfig

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


@contextlib.contextmanager
def _naming_the_option(number: int) -> Iterator[None]:
    try:
        yield
    except PinError as error:
        option = f"additional_config.relay.system_prompts[{number}]"
        raise ValueError(f"{option}: {error}") from error
