# SPDX-License-Identifier: Apache-2.0
"""Computing the contexts of ``additional_config.relay.contexts`` when an engine starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_relay.commands.at_start import keep_texts, keep_texts_async, once
from vllm_relay.long_context.client import Context, keep_context, keep_context_async


def preload_contexts(engine: Any) -> None:
    """Compute and keep the configured contexts in an LLMEngine; those that are stored are found.

    Raises:
        ValueError: one cannot be kept.
    """
    _log(keep_texts(engine, "contexts", lambda _, token_ids: keep_context(engine, token_ids)))


async def preload_contexts_async(engine: Any, online_renderer: Any = None) -> None:
    """:func:`preload_contexts` for an AsyncLLM, before its first request.

    The first call computes them; all others wait for it and share its error.

    Args:
        online_renderer: the server's OnlineRenderer, which knows its chat template.
    """

    async def preload() -> None:
        contexts = await keep_texts_async(
            engine,
            online_renderer,
            "contexts",
            lambda _, token_ids: keep_context_async(engine, token_ids),
        )
        engine.relay_configured_contexts = {each.context_id for each in contexts}
        _log(contexts)

    await once(engine, "relay_preloading", preload)


def configured_contexts(engine: Any) -> set[str]:
    """Ids of the contexts that :func:`preload_contexts_async` has computed, or found."""
    return getattr(engine, "relay_configured_contexts", set())


def _log(contexts: Sequence[Context]) -> None:
    from vllm.logger import init_logger

    if contexts:
        init_logger("vllm.relay").info(
            "vllm-relay: contexts are ready: %d, tokens: %s",
            len(contexts),
            f"{sum(context.num_tokens for context in contexts):,}",
        )
