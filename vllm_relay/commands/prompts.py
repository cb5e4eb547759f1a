# SPDX-License-Identifier: Apache-2.0
"""The tokens with which all prompts begin that continue a text or a conversation.

The last tokens of a text depend on what comes after it, so a prefix is what several continuations
have in common.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from vllm_relay.commands.errors import CommandError

MAX_TOKEN_IDS = 1 << 31
"""More than any vocabulary has."""
Prompt = str | Sequence[int] | Sequence[dict[str, Any]]
"""Text, token ids, or the messages of a conversation."""

_CONTINUATIONS = ("a", " 0", "\nZ")
_OF_STRANGE_PROMPTS = (TypeError, LookupError, AttributeError)


def continued_texts(text: str) -> list[str]:
    """Texts that begin with ``text`` and go on differently."""
    return [text + continuation for continuation in _CONTINUATIONS]


def continued_conversations(messages: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Conversations that begin with ``messages`` and go on differently.

    Raises:
        CommandError: 400 ``messages`` is empty or has parts that are no text.
    """
    if not messages:
        raise CommandError(400, "messages: an empty list was given, expected at least one message")
    for name in ("content", "role"):
        if not all(isinstance(message.get(name), str) for message in messages):
            raise CommandError(400, f"messages: expected a text as {name} of every message")
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


def tokens_of(llm: Any, prompt: Prompt) -> list[int]:
    """The tokens with which prompts begin that begin with ``prompt``, as the ``LLM`` has them.

    Raises:
        CommandError: 400 they cannot be found.
    """
    if not isinstance(prompt, str | list | tuple):
        raise CommandError(
            400, f"{prompt!r} was given as prompt, expected a text, token ids or messages"
        )
    if is_tokens(prompt):
        return list(prompt)
    if not isinstance(prompt, str):
        wrong = next((each for each in prompt if not isinstance(each, dict)), None)
        if wrong is not None:
            raise CommandError(
                400,
                f"{wrong!r} was given in a prompt, expected token ids, from 0 to "
                f"{MAX_TOKEN_IDS - 1}, or messages",
            )
    renderer = getattr(llm, "llm_engine", llm).renderer
    _check_tokenizer(renderer)
    if isinstance(prompt, str):
        if not prompt:
            raise CommandError(400, "the text is empty: expected at least a KV block of tokens")
        with refusals("this text", *_OF_STRANGE_PROMPTS):
            return _tokens_of_text(renderer, renderer.render_cmpl(_texts(prompt)))
    conversations = continued_conversations(prompt)
    with refusals("these messages", *_OF_STRANGE_PROMPTS):
        return common_tokens(render_conversations(llm, renderer, conversations))


async def text_tokens_async(renderer: Any, text: str) -> list[int]:
    """The tokens with which prompts begin that begin with ``text``, as /v1/completions has them.

    Raises:
        CommandError: 400 the text cannot be tokenized.
    """
    _check_tokenizer(renderer)
    with refusals("this text", *_OF_STRANGE_PROMPTS):
        return _tokens_of_text(renderer, await renderer.render_cmpl_async(_texts(text)))


async def conversation_tokens_async(online_renderer: Any, messages: Any) -> list[int]:
    """The tokens with which conversations begin, as /v1/chat/completions has them.

    Raises:
        CommandError: 400 the chat template does not take these messages.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    _check_tokenizer(online_renderer.renderer)
    prompts = []
    for conversation in continued_conversations(messages):
        with refusals("these messages", *_OF_STRANGE_PROMPTS):
            request = ChatCompletionRequest(messages=conversation, model="")
            rendered = await online_renderer.render_chat(request)
        if not isinstance(rendered, tuple):
            raise CommandError(400, f"messages: {rendered.error.message}")
        prompts += rendered[1]
    return common_tokens(prompts)


def _texts(text: str) -> list[dict[str, Any]]:
    """To be rendered for :func:`_tokens_of_text`."""
    return [{"prompt": each} for each in (text, *continued_texts(text))]


def _tokens_of_text(renderer: Any, prompts: Sequence[Any]) -> list[int]:
    """
    Raises:
        CommandError: 400 there is no token that does not depend on what comes after the text.
    """
    whole, *continued = prompts
    token_ids = common_tokens(continued)
    if not token_ids:
        raise CommandError(
            400,
            f"a text of {len(whole['prompt_token_ids'])} tokens was given, all of which may be "
            "others where it goes on, but only full KV blocks are kept: expected at least a KV "
            f"block of {renderer.config.cache_config.block_size} tokens (--block-size)",
        )
    return token_ids


def render_conversations(
    llm: Any, renderer: Any, conversations: Any, template_kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Prompts of vLLM, rendered as LLM.chat does by default.

    Args:
        template_kwargs: further variables of the chat template.
    """
    from vllm.renderers.params import ChatParams
    from vllm.utils.mistral import is_mistral_tokenizer

    chat_params = ChatParams(
        chat_template=getattr(llm, "chat_template", None),
        chat_template_kwargs={
            "add_generation_prompt": True,
            "continue_final_message": False,
            "tools": None,
            "tokenize": is_mistral_tokenizer(renderer.tokenizer),
            **(template_kwargs or {}),
        },
    )
    tok_params = renderer.default_chat_tok_params.with_kwargs(add_special_tokens=False)
    return renderer.render_chat(conversations, chat_params, tok_params)[1]


@contextlib.contextmanager
def refusals(what: str, *others: type[Exception]) -> Iterator[None]:
    """Raise a CommandError, 400, where vLLM, or a chat template, does not take a prompt.

    Args:
        others: what else that raises, where nothing is done but read it.
    """
    from jinja2 import TemplateError
    from pydantic import ValidationError
    from vllm.exceptions import VLLMClientError

    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]  # of the many kinds of message that it is not
        reason = f"{first['loc'][-1]}: {first['msg']}"
        raise CommandError(400, f"vLLM does not take {what}: {reason}") from error
    except (TemplateError, ValueError, VLLMClientError, *others) as error:
        reason = str(error) or type(error).__name__
        raise CommandError(400, f"vLLM does not take {what}: {reason}") from error


def _check_tokenizer(renderer: Any) -> None:
    if renderer.tokenizer is None:
        raise CommandError(
            400, "with skip_tokenizer_init only token ids can be pinned, but a text was given"
        )
