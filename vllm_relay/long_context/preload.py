# SPDX-License-Identifier: Apache-2.0
"""Computing the contexts of ``additional_config.relay.contexts`` when an engine starts."""

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
from vllm_relay.config import RelayConfig
from vllm_relay.long_context.client import Context, keep_context, keep_context_async

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def preload_contexts(engine: Any) -> None:
    """Compute and keep the configured contexts in an LLMEngine; those that are stored are found.

    Raises:
        ValueError: one cannot be kept.
    """
    contexts = []
    for number, text in enumerate(_texts(engine.vllm_config)):
        with naming_the_option("contexts", number):
            contexts.append(keep_context(engine, system_prompt_tokens(engine, text)))
    _log(contexts)


async def preload_contexts_async(engine: Any, online_renderer: Any = None) -> None:
    """:func:`preload_contexts` for an AsyncLLM, before its first request.

    The first call computes them; all others wait for it and share its error.

    Args:
        online_renderer: the server's OnlineRenderer, which knows its chat template.
    """
    await once(engine, "relay_preloading", lambda: _preload_async(engine, online_renderer))


async def _preload_async(engine: Any, online_renderer: Any) -> None:
    contexts = []
    for number, text in enumerate(_texts(engine.vllm_config)):
        with naming_the_option("contexts", number):
            token_ids = await system_prompt_tokens_async(engine, online_renderer, text)
            contexts.append(await keep_context_async(engine, token_ids))
    engine.relay_configured_contexts = {each.context_id for each in contexts}
    _log(contexts)


def configured_contexts(engine: Any) -> set[str]:
    """Ids of the contexts that :func:`preload_contexts_async` has computed, or found."""
    return getattr(engine, "relay_configured_contexts", set())


def _texts(vllm_config: VllmConfig) -> list[str]:
    return read_texts("contexts", RelayConfig.from_vllm_config(vllm_config).contexts)


def _log(contexts: Sequence[Context]) -> None:
    from vllm.logger import init_logger

    if contexts:
        init_logger("vllm.relay").info(
            "vllm-relay: contexts are ready: %d, tokens: %s",
            len(contexts),
            f"{sum(context.num_tokens for context in contexts):,}",
        )
