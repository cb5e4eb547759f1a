# SPDX-License-Identifier: Apache-2.0
"""Contexts from the front end: through an ``LLM``, an LLMEngine or an AsyncLLM.

A prompt is computed by an ordinary request for one token that asks to become a context when it has
ended.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from vllm_relay.commands import engine as commands
from vllm_relay.commands.at_start import keep_texts, keep_texts_async, once
from vllm_relay.commands.compute import compute, compute_async
from vllm_relay.commands.errors import CommandError
from vllm_relay.commands.prompts import Prompt, tokens_of
from vllm_relay.limits import sparse_is_selected
from vllm_relay.long_context.commands import HOW_TO_SELECT
from vllm_relay.long_context.orders import KEEP_ARG, ContextReport

Context = ContextReport
"""A stored context, as its first worker sees it."""


def keep_context(llm: Any, prompt: Prompt) -> Context:
    """Compute a prompt and keep it: later prompts that begin like it reuse it to the token.

    Args:
        llm: an ``LLM`` or LLMEngine without unfinished requests.
        prompt: token ids; a text, as for ``LLM.generate``; or messages, as for ``LLM.chat``.

    Raises:
        CommandError: it cannot be kept; the message says why.
        RuntimeError: the engine has unfinished requests.
    """
    engine = _checked(llm)
    token_ids = tokens_of(llm, prompt)
    if engine.has_unfinished_requests():
        raise RuntimeError(
            "a context cannot be computed while the engine has unfinished requests: finish them "
            "first"
        )
    declared = commands.call(engine, "declare_context", {"token_ids": token_ids})
    if not declared["is_known"]:
        compute(engine, token_ids, _request_id(), {KEEP_ARG: True})
    return _kept(list_contexts(engine), declared["id"])


async def keep_context_async(engine: Any, token_ids: Sequence[int]) -> Context:
    """:func:`keep_context` for the tokens of a prompt and an AsyncLLM, whatever else it does.

    Raises:
        CommandError: it cannot be kept; the message says why.
    """
    asked = {"token_ids": list(token_ids)}
    declared = await commands.call_async(_checked(engine), "declare_context", asked)
    if not declared["is_known"]:
        await compute_async(engine, token_ids, _request_id(), {KEEP_ARG: True})
    return _kept(await list_contexts_async(engine), declared["id"])


def list_contexts(llm: Any) -> list[Context]:
    """The stored contexts."""
    return [Context(**entry) for entry in commands.call(_checked(llm), "contexts", {})]


async def serve_clients_async(engine: Any, *, keeps: bool) -> None:
    """Tells the engine of an AsyncLLM that others send its requests, and whether those that ask to
    become a context do."""
    await commands.call_async(engine, "serve_clients", {"keeps": keeps})


async def list_contexts_async(engine: Any) -> list[Context]:
    """:func:`list_contexts` for an AsyncLLM."""
    found = await commands.call_async(_checked(engine), "contexts", {})
    return [Context(**entry) for entry in found]


def delete_context(llm: Any, context_id: str) -> None:
    """Forget a context, and delete its file; requests that read it go on.

    Raises:
        CommandError: there is no such context.
    """
    commands.call(_checked(llm), "delete_context", {"context_id": context_id})


async def delete_context_async(engine: Any, context_id: str) -> None:
    """:func:`delete_context` for an AsyncLLM."""
    await commands.call_async(_checked(engine), "delete_context", {"context_id": context_id})


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


def _kept(contexts: Sequence[Context], context_id: str) -> Context:
    for context in contexts:
        if context.context_id == context_id:
            return context
    raise CommandError(
        409, "the request that computed the context ended before all of it was computed: try again"
    )


def _checked(llm: Any) -> Any:
    """The engine of an ``LLM``, or an engine itself, if it keeps contexts."""
    engine = getattr(llm, "llm_engine", llm)
    if not sparse_is_selected(engine.vllm_config):
        raise CommandError(501, f"contexts are kept by RELAY_SPARSE only: {HOW_TO_SELECT}")
    commands.check_one_engine(engine.vllm_config, "contexts are kept")
    return engine


def _request_id() -> str:
    return f"relay-context-{uuid.uuid4().hex[:8]}"
