# SPDX-License-Identifier: Apache-2.0
"""What engines compute when they start: the texts of an option, and when they are due."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from vllm_relay.commands.errors import CommandError
from vllm_relay.commands.prompts import (
    conversation_tokens_async,
    text_tokens_async,
    tokens_of,
)
from vllm_relay.config import SECTION, RelayConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.relay")
_is_preparing: ContextVar[bool] = ContextVar("_is_preparing", default=False)


async def once(
    engine: Any, attribute: str, prepare: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    """Run ``prepare()`` before the first request of an AsyncLLM.

    The first call starts it, whether it is cancelled or not; all others wait for it and share its
    error. The requests that anything here sends itself, in whatever task, wait for nothing.

    Args:
        attribute: of the engine, which remembers it.
    """
    if _is_preparing.get():
        return

    async def run() -> None:
        _is_preparing.set(True)
        await prepare()

    preparing = getattr(engine, attribute, None)
    if preparing is None:
        preparing = asyncio.create_task(run())
        setattr(engine, attribute, preparing)
    await asyncio.shield(preparing)


def check_texts(
    vllm_config: VllmConfig,
    option: str,
    given_texts: Sequence[str],
    *needs: tuple[bool, str],
    instead: str,
) -> None:
    """Refuse texts that no engine of this configuration can compute.

    Args:
        needs: more that has to be: whether it is, and what to say if not.
        instead: of a tokenizer.

    Raises:
        ValueError: with the reason and the way out.
    """
    if not given_texts:
        return
    read_texts(option, given_texts)
    model_config = vllm_config.model_config
    tokenizes = model_config is None or not model_config.skip_tokenizer_init
    for is_met, need in (
        *needs,
        (
            vllm_config.cache_config.enable_prefix_caching,
            "prefix caching: set --enable-prefix-caching",
        ),
        (tokenizes, f"a tokenizer: remove --skip-tokenizer-init, or {instead}"),
    ):
        if not is_met:
            raise ValueError(f"{SECTION}.{option} needs {need}")


def keep_texts(engine: Any, option: str, keep: Callable[[int, list[int]], Any]) -> list[Any]:
    """What ``keep`` makes of the texts of an option in an LLMEngine.

    Args:
        keep: is given the number of a text and its tokens, see :func:`_system_prompt_tokens`.

    Raises:
        ValueError: one cannot be read, or ``keep`` refuses it; the message says which.
    """
    kept = []
    for number, text in _texts_of(engine, option):
        with _naming_the_option(option, number):
            token_ids = _system_prompt_tokens(engine, text)
            with _saying_how_long(option, number, len(token_ids)):
                kept.append(keep(number, token_ids))
    return kept


async def keep_texts_async(
    engine: Any,
    online_renderer: Any,
    option: str,
    keep: Callable[[int, list[int]], Awaitable[Any]],
) -> list[Any]:
    """:func:`keep_texts` for an AsyncLLM.

    Args:
        online_renderer: the server's OnlineRenderer, which knows its chat template; without one it
            is the tokenizer's.
    """
    kept = []
    for number, text in _texts_of(engine, option):
        with _naming_the_option(option, number):
            token_ids = await _system_prompt_tokens_async(engine, online_renderer, text)
            with _saying_how_long(option, number, len(token_ids)):
                kept.append(await keep(number, token_ids))
    return kept


def _texts_of(engine: Any, option: str) -> Iterator[tuple[int, str]]:
    options = RelayConfig.from_vllm_config(engine.vllm_config)
    return enumerate(read_texts(option, getattr(options, option)))


@contextlib.contextmanager
def _saying_how_long(option: str, number: int, num_tokens: int) -> Iterator[None]:
    """In the log, before and after: a long text takes minutes."""
    what, began_s = f"{SECTION}.{option}[{number}]", time.monotonic()
    logger.info("vllm-relay: %s: computing %s tokens", what, f"{num_tokens:,}")
    yield
    logger.info("vllm-relay: %s: done in %.1f s", what, time.monotonic() - began_s)


@contextlib.contextmanager
def _naming_the_option(option: str, number: int) -> Iterator[None]:
    """Raise a ValueError that says which text of an option a CommandError is about."""
    try:
        yield
    except CommandError as error:
        raise ValueError(f"{SECTION}.{option}[{number}]: {error}") from error


def read_texts(option: str, given_texts: Sequence[str]) -> list[str]:
    """The texts of an option, those of files read.

    Raises:
        ValueError: a file cannot be read, or a text is empty.
    """
    texts = []
    for number, given in enumerate(given_texts):
        place = f"{SECTION}.{option}[{number}]"
        text = given
        if given.startswith("@"):
            try:
                with open(given[1:], encoding="utf-8") as file:
                    text = file.read()
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(
                    f"{place}: {given!r} was given, expected @ and the path of a text file: {error}"
                ) from None
        if not text.strip():
            raise ValueError(f"{place}: {given!r} was given, expected a text that is not empty")
        texts.append(text)
    return texts


def _system_prompt_tokens(engine: Any, text: str) -> list[int]:
    """The tokens with which prompts begin whose system prompt is, or begins with, ``text``; of a
    model without a chat template, those that begin with it.

    Raises:
        CommandError: they cannot be found.
    """
    if _has_chat_template(engine.renderer, None):
        return tokens_of(engine, [{"role": "system", "content": text}])
    return tokens_of(engine, text)


async def _system_prompt_tokens_async(engine: Any, online_renderer: Any, text: str) -> list[int]:
    """:func:`_system_prompt_tokens` for an AsyncLLM, with the chat template of its server."""
    if online_renderer is None:
        return _system_prompt_tokens(engine, text)
    if _has_chat_template(engine.renderer, online_renderer.chat_template):
        messages = [{"role": "system", "content": text}]
        return await conversation_tokens_async(online_renderer, messages)
    return await text_tokens_async(engine.renderer, text)


def _has_chat_template(renderer: Any, chat_template: str | None) -> bool:
    """Whether a chat template is given, or the tokenizer or vLLM has one for this model."""
    from vllm.renderers.hf import HfRenderer, resolve_chat_template

    if chat_template is not None or not isinstance(renderer, HfRenderer):
        return True  # the renderers of other tokenizers have one built in
    found = resolve_chat_template(
        renderer.get_tokenizer(), None, None, model_config=renderer.model_config
    )
    return found is not None
