# SPDX-License-Identifier: Apache-2.0
"""Pinning prompts from the front end: through an ``LLM``, an LLMEngine or an AsyncLLM.

A prompt is declared in the engine core, computed by an ordinary request for one token, and held
there when that request ends. Nothing is pinned if any of this fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_relay.prefix_cache.commands import HOW_TO_SELECT, result_of
from vllm_relay.prefix_cache.pins import EXTRA_ARG, PinError
from vllm_relay.prefix_cache.prompts import (
    Prompt,
    common_tokens,
    continued_conversations,
    continued_texts,
    is_tokens,
    read_system_prompts,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams


@dataclass(frozen=True)
class Pin:
    """A pinned prompt. ``tokens``: those in full KV blocks, which are what is pinned.

    ``blocks`` and ``bytes`` are 0 while ``resident`` is false: after a reset of the prefix cache,
    until a request computes the prompt again. ``problem`` says why it is not resident, if known.
    """

    id: str
    tokens: int
    blocks: int
    bytes: int
    resident: bool
    problem: str | None = None


def pin(llm: Any, prompt: Prompt, pin_id: str | None = None) -> Pin:
    """Compute a prompt and keep its full KV blocks until :func:`unpin`.

    Args:
        llm: an ``LLM`` or LLMEngine without unfinished requests.
        prompt: token ids; a text, as for ``LLM.generate``; or messages, as for ``LLM.chat``.
        pin_id: its name; made from its tokens if None. The same prompt can be pinned again.

    Raises:
        PinError: the prompt cannot be pinned; the message says why.
        RuntimeError: the engine has unfinished requests.
    """
    token_ids = _tokens_of(llm, prompt)
    return pin_tokens(getattr(llm, "llm_engine", llm), token_ids, pin_id)


def unpin(llm: Any, pin_id: str) -> None:
    """Let a pinned prompt be evicted again.

    Raises:
        PinError: there is no such pin.
    """
    _command(getattr(llm, "llm_engine", llm), "unpin", {"pin_id": pin_id})


def list_pins(llm: Any) -> list[Pin]:
    """The pinned prompts."""
    entries = _command(getattr(llm, "llm_engine", llm), "pins", {})
    return [Pin(**entry) for entry in entries]


def top_prefixes(llm: Any, count: int = 10) -> list[dict[str, Any]]:
    """The prefixes with most hit tokens, most first: their id, tokens and hits."""
    return _command(getattr(llm, "llm_engine", llm), "top_prefixes", {"count": count})


def pin_tokens(engine: Any, token_ids: Sequence[int], pin_id: str | None = None) -> Pin:
    """:func:`pin` for the tokens of a prompt and an LLMEngine."""
    _check_config(engine.vllm_config)
    if engine.has_unfinished_requests():
        raise RuntimeError(
            "a prompt cannot be pinned while the engine has unfinished requests: finish them first"
        )
    pin_id = pin_id or id_of_tokens(token_ids)
    declared = _command(engine, "declare_pin", _declaration(pin_id, token_ids))
    if declared["resident"]:
        return _pin_of(declared)
    try:
        with _refusals("these tokens"):
            [prompt] = engine.renderer.render_cmpl([_prompt(token_ids, declared)])
            engine.add_request(_request_id(pin_id), prompt, _params(pin_id))
        while engine.has_unfinished_requests():
            engine.step()
        return _resident(_pin_of(_command(engine, "pin", {"pin_id": pin_id})))
    except BaseException:
        if declared["is_new"]:
            with contextlib.suppress(PinError):
                _command(engine, "unpin", {"pin_id": pin_id})
        raise


async def pin_tokens_async(engine: Any, token_ids: Sequence[int], pin_id: str | None = None) -> Pin:
    """:func:`pin` for the tokens of a prompt and an AsyncLLM, whatever else it is doing."""
    _check_config(engine.vllm_config)
    pin_id = pin_id or id_of_tokens(token_ids)
    declared = await command_async(engine, "declare_pin", _declaration(pin_id, token_ids))
    if declared["resident"]:
        return _pin_of(declared)
    try:
        with _refusals("these tokens"):
            [prompt] = await engine.renderer.render_cmpl_async([_prompt(token_ids, declared)])
            async for _ in engine.generate(prompt, _params(pin_id), _request_id(pin_id)):
                pass
        return _resident(_pin_of(await command_async(engine, "pin", {"pin_id": pin_id})))
    except BaseException:
        if declared["is_new"]:
            with contextlib.suppress(PinError):
                await command_async(engine, "unpin", {"pin_id": pin_id})
        raise


async def command_async(engine: Any, name: str, arguments: dict[str, Any]) -> Any:
    """Run one of `commands` in the engine core of an AsyncLLM.

    Raises:
        PinError: the command's.
    """
    _check_config(engine.vllm_config)
    return result_of(await engine.engine_core.call_utility_async("relay_command", name, arguments))


def pin_system_prompts(engine: Any) -> None:
    """Pin ``additional_config.relay.system_prompts`` in an LLMEngine.

    Raises:
        ValueError: one cannot be pinned.
    """
    pins = []
    for number, text in enumerate(_system_prompts(engine.vllm_config)):
        with _naming_the_option(number):
            token_ids = _system_prompt_tokens(engine, text)
            pins.append(pin_tokens(engine, token_ids, f"system-{number}"))
    if pins:
        _log_system_prompts(pins, _command(engine, "size", {}))


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
            if online_renderer is None:
                token_ids = _system_prompt_tokens(engine, text)
            elif has_chat_template(engine.renderer, online_renderer.chat_template):
                messages = [{"role": "system", "content": text}]
                token_ids = await conversation_tokens_async(online_renderer, messages)
            else:
                token_ids = await text_tokens_async(engine.renderer, text)
            pins.append(await pin_tokens_async(engine, token_ids, f"system-{number}"))
    if pins:
        _log_system_prompts(pins, await command_async(engine, "size", {}))


async def text_tokens_async(renderer: Any, text: str) -> list[int]:
    """The tokens with which prompts begin that begin with ``text``, as /v1/completions has them.

    Raises:
        PinError: 400 the text cannot be tokenized.
    """
    _check_tokenizer(renderer)
    with _refusals("this text"):
        return common_tokens(await renderer.render_cmpl_async(_texts(text)))


async def conversation_tokens_async(online_renderer: Any, messages: Any) -> list[int]:
    """The tokens with which conversations begin, as /v1/chat/completions has them.

    Raises:
        PinError: 400 the chat template does not take these messages.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    _check_tokenizer(online_renderer.renderer)
    prompts = []
    for conversation in continued_conversations(messages):
        with _refusals("these messages"):
            request = ChatCompletionRequest(messages=conversation, model="")
            rendered = await online_renderer.render_chat(request)
        if not isinstance(rendered, tuple):
            raise PinError(400, f"messages: {rendered.error.message}")
        prompts += rendered[1]
    return common_tokens(prompts)


def has_chat_template(renderer: Any, chat_template: str | None) -> bool:
    """Whether a chat template is given, or the tokenizer or vLLM has one for this model."""
    from vllm.renderers.hf import HfRenderer, resolve_chat_template

    if chat_template is not None or not isinstance(renderer, HfRenderer):
        return True  # the renderers of other tokenizers have one built in
    found = resolve_chat_template(
        renderer.get_tokenizer(), None, None, model_config=renderer.model_config
    )
    return found is not None


def id_of_tokens(token_ids: Sequence[int]) -> str:
    """The id of a pin that is given none."""
    return hashlib.sha256(",".join(map(str, token_ids)).encode()).hexdigest()[:12]


def _system_prompt_tokens(engine: Any, text: str) -> list[int]:
    if has_chat_template(engine.renderer, None):
        return _tokens_of(engine, [{"role": "system", "content": text}])
    return _tokens_of(engine, text)


def _tokens_of(llm: Any, prompt: Prompt) -> list[int]:
    if not isinstance(prompt, str | list | tuple):
        raise PinError(
            400, f"{prompt!r} was given as prompt, expected a text, token ids or messages"
        )
    if is_tokens(prompt):
        return list(prompt)
    renderer = getattr(llm, "llm_engine", llm).renderer
    _check_tokenizer(renderer)
    if isinstance(prompt, str):
        if not prompt:
            raise PinError(400, "the text is empty: expected at least a KV block of tokens")
        with _refusals("this text"):
            return common_tokens(renderer.render_cmpl(_texts(prompt)))
    conversations = continued_conversations(prompt)
    with _refusals("these messages"):
        return common_tokens(_render_conversations(llm, renderer, conversations))


def _texts(text: str) -> list[dict[str, Any]]:
    return [{"prompt": continued} for continued in continued_texts(text)]


def _render_conversations(llm: Any, renderer: Any, conversations: Any) -> Any:
    """Render as LLM.chat does by default."""
    from vllm.renderers.params import ChatParams
    from vllm.utils.mistral import is_mistral_tokenizer

    chat_params = ChatParams(
        chat_template=getattr(llm, "chat_template", None),
        chat_template_kwargs={
            "add_generation_prompt": True,
            "continue_final_message": False,
            "tools": None,
            "tokenize": is_mistral_tokenizer(renderer.tokenizer),
        },
    )
    tok_params = renderer.default_chat_tok_params.with_kwargs(add_special_tokens=False)
    return renderer.render_chat(conversations, chat_params, tok_params)[1]


@contextlib.contextmanager
def _refusals(what: str) -> Iterator[None]:
    """Raise a PinError where vLLM, or a chat template, does not take a prompt."""
    from jinja2 import TemplateError
    from vllm.exceptions import VLLMClientError

    try:
        yield
    except (TemplateError, ValueError, VLLMClientError) as error:
        raise PinError(400, f"vLLM does not take {what}: {error}") from error


def _check_tokenizer(renderer: Any) -> None:
    if renderer.tokenizer is None:
        raise PinError(
            400, "with skip_tokenizer_init only token ids can be pinned, but a text was given"
        )


def _check_config(vllm_config: VllmConfig) -> None:
    from vllm_relay.config import scheduler_is_selected

    if not scheduler_is_selected(vllm_config):
        raise PinError(501, "prompts are pinned by RelayScheduler only: " + HOW_TO_SELECT)
    engines = vllm_config.parallel_config.data_parallel_size
    if engines > 1:
        raise PinError(
            501, f"prompts can be pinned in one engine only, but --data-parallel-size is {engines}"
        )


def _system_prompts(vllm_config: VllmConfig) -> list[str]:
    from vllm_relay.config import RelayConfig

    return read_system_prompts(RelayConfig.from_vllm_config(vllm_config))


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


def _command(engine: Any, name: str, arguments: dict[str, Any]) -> Any:
    from vllm.v1.engine.core_client import InprocClient

    _check_config(engine.vllm_config)
    client = engine.engine_core
    if isinstance(client, InprocClient):
        return result_of(client.engine_core.relay_command(name, arguments))
    return result_of(client.call_utility("relay_command", name, arguments))


def _declaration(pin_id: str, token_ids: Sequence[int]) -> dict[str, Any]:
    return {"pin_id": pin_id, "token_ids": list(token_ids)}


def _prompt(token_ids: Sequence[int], declared: dict[str, Any]) -> dict[str, Any]:
    # no token beyond the last block: with sliding windows it could push the first blocks out
    return {"prompt_token_ids": list(token_ids[: declared["tokens"]])}


def _params(pin_id: str) -> SamplingParams:
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=1, temperature=0.0, detokenize=False, extra_args={EXTRA_ARG: pin_id}
    )


def _request_id(pin_id: str) -> str:
    return f"relay-pin-{pin_id}-{uuid.uuid4().hex[:8]}"


def _pin_of(entry: dict[str, Any]) -> Pin:
    return Pin(**{name: entry[name] for name in Pin.__dataclass_fields__})


def _resident(pin: Pin) -> Pin:
    if pin.resident:
        return pin
    raise PinError(
        507 if pin.problem else 409,
        pin.problem
        or f"the request that computed pin {pin.id!r} ended without having computed all of it: "
        "try again",
    )
