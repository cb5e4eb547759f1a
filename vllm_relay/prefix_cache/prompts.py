# SPDX-License-Identifier: Apache-2.0
"""The tokens with which all prompts begin that continue a text or a conversation.

The last tokens of a text depend on what comes after it, so a prefix is what several continuations
have in common.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

from vllm_relay.config import scheduler_is_selected
from vllm_relay.prefix_cache.pins import PinError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_relay.config import RelayConfig

MAX_TOKEN_IDS = 1 << 31
"""More than any vocabulary has."""
Prompt = str | Sequence[int] | Sequence[dict[str, Any]]
"""Text, token ids, or the messages of a conversation."""

_CONTINUATIONS = ("a", " 0", "\nZ")


def continued_texts(text: str) -> list[str]:
    """Texts that begin with ``text`` and go on differently."""
    return [text + continuation for continuation in _CONTINUATIONS]


def continued_conversations(messages: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Conversations that begin with ``messages`` and go on differently.

    Raises:
        PinError: 400 ``messages`` is empty or has parts that are no text.
    """
    if not messages:
        raise PinError(400, "messages: an empty list was given, expected at least one message")
    if not all(isinstance(message.get("content"), str) for message in messages):
        raise PinError(400, "messages: expected a text as content of every message")
    role = "assistant" if messages[-1].get("role") == "user" else "user"
    return [
        [*messages, {"role": role, "content": continuation.strip()}]
        for continuation in _CONTINUATIONS
    ]


def common_tokens(prompts: Sequence[Any]) -> list[int]:
    """The tokens with which all of vLLM's rendered prompts begin."""
    token_ids = [list(prompt["prompt_token_ids"]) for prompt in prompts]
    return list(os.path.commonprefix(token_ids))


def is_tokens(prompt: Prompt) -> TypeGuard[Sequence[int]]:
    return not isinstance(prompt, str) and all(
        isinstance(each, int) and not isinstance(each, bool) and 0 <= each < MAX_TOKEN_IDS
        for each in prompt
    )


def read_texts(option: str, given_texts: Sequence[str]) -> list[str]:
    """The texts of an option, those of files read.

    Raises:
        ValueError: a file cannot be read, or a text is empty.
    """
    texts = []
    for number, given in enumerate(given_texts):
        place = f"additional_config.relay.{option}[{number}]"
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
    elif vllm_config.parallel_config.data_parallel_size > 1:
        reason = "one engine: set --data-parallel-size 1"
    elif model_config is not None and model_config.runner_type != "generate":
        reason = f"a model that generates, given --runner {model_config.runner_type}"
    elif model_config is not None and model_config.skip_tokenizer_init:
        reason = (
            "a tokenizer: remove --skip-tokenizer-init, or pin token ids with "
            "vllm_relay.prefix_cache.pin"
        )
    if reason is not None:
        raise ValueError(f"additional_config.relay.system_prompts needs {reason}")


def check_contexts(vllm_config: VllmConfig, options: RelayConfig) -> None:
    """Refuse ``contexts`` that no engine of this configuration can keep.

    Raises:
        ValueError: with the reason and the way out.
    """
    if not options.contexts:
        return
    read_texts("contexts", options.contexts)
    model_config = vllm_config.model_config
    reason = None
    if not vllm_config.cache_config.enable_prefix_caching:
        reason = "prefix caching: set --enable-prefix-caching"
    elif vllm_config.parallel_config.data_parallel_size > 1:
        reason = "one engine: set --data-parallel-size 1"
    elif model_config is not None and model_config.skip_tokenizer_init:
        reason = (
            "a tokenizer: remove --skip-tokenizer-init, or keep token ids with "
            "vllm_relay.long_context.client.keep_context"
        )
    if reason is not None:
        raise ValueError(f"additional_config.relay.contexts needs {reason}")
