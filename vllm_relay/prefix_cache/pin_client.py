# SPDX-License-Identifier: Apache-2.0
"""Pinning prompts from the front end: through an ``LLM``, an LLMEngine or an AsyncLLM.

A prompt is declared in the engine core, computed by an ordinary request for one token, and held
there when that request ends. Nothing is pinned if any of this fails.
"""

from __future__ import annotations

import contextlib
import hashlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_relay.commands import engine as commands
from vllm_relay.commands.errors import CommandError
from vllm_relay.commands.prompts import Prompt, refusals, tokens_of
from vllm_relay.modules.prompt.plan import EXTRA_ARG as PLAN_ARG
from vllm_relay.modules.prompt.plan import ModulePlan
from vllm_relay.prefix_cache.commands import HOW_TO_SELECT
from vllm_relay.prefix_cache.pins import EXTRA_ARG

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
        CommandError: the prompt cannot be pinned; the message says why.
        RuntimeError: the engine has unfinished requests.
    """
    token_ids = tokens_of(llm, prompt)
    return pin_tokens(getattr(llm, "llm_engine", llm), token_ids, pin_id)


def unpin(llm: Any, pin_id: str) -> None:
    """Let a pinned prompt be evicted again.

    Raises:
        CommandError: there is no such pin.
    """
    command(getattr(llm, "llm_engine", llm), "unpin", {"pin_id": pin_id})


def list_pins(llm: Any) -> list[Pin]:
    """The pinned prompts."""
    entries = command(getattr(llm, "llm_engine", llm), "pins", {})
    return [Pin(**entry) for entry in entries]


def top_prefixes(llm: Any, count: int = 10) -> list[dict[str, Any]]:
    """The prefixes with most hit tokens, most first: their id, tokens and hits."""
    return command(getattr(llm, "llm_engine", llm), "top_prefixes", {"count": count})


def pin_tokens(
    engine: Any,
    token_ids: Sequence[int],
    pin_id: str | None = None,
    plan: ModulePlan | None = None,
) -> Pin:
    """:func:`pin` for the tokens of a prompt and an LLMEngine.

    Args:
        plan: of a prompt with modules; these are pinned.
    """
    _check_config(engine.vllm_config)
    if engine.has_unfinished_requests():
        raise RuntimeError(
            "a prompt cannot be pinned while the engine has unfinished requests: finish them first"
        )
    pin_id = pin_id or id_of_tokens(token_ids, plan)
    declared = command(engine, "declare_pin", _declaration(pin_id, token_ids, plan))
    if declared["resident"]:
        return _pin_of(declared)
    try:
        with refusals("these tokens"):
            [prompt] = engine.renderer.render_cmpl([_prompt(token_ids, declared, plan)])
            engine.add_request(_request_id(pin_id), prompt, _params(pin_id, plan))
        while engine.has_unfinished_requests():
            engine.step()
        return _resident(_pin_of(command(engine, "pin", {"pin_id": pin_id})))
    except BaseException:
        if declared["is_new"]:
            with contextlib.suppress(CommandError):
                command(engine, "unpin", {"pin_id": pin_id})
        raise


async def pin_tokens_async(
    engine: Any,
    token_ids: Sequence[int],
    pin_id: str | None = None,
    plan: ModulePlan | None = None,
) -> Pin:
    """:func:`pin_tokens` for an AsyncLLM, whatever else it is doing."""
    _check_config(engine.vllm_config)
    pin_id = pin_id or id_of_tokens(token_ids, plan)
    declared = await command_async(engine, "declare_pin", _declaration(pin_id, token_ids, plan))
    if declared["resident"]:
        return _pin_of(declared)
    try:
        with refusals("these tokens"):
            given = _prompt(token_ids, declared, plan)
            [prompt] = await engine.renderer.render_cmpl_async([given])
            async for _ in engine.generate(prompt, _params(pin_id, plan), _request_id(pin_id)):
                pass
        return _resident(_pin_of(await command_async(engine, "pin", {"pin_id": pin_id})))
    except BaseException:
        if declared["is_new"]:
            with contextlib.suppress(CommandError):
                await command_async(engine, "unpin", {"pin_id": pin_id})
        raise


def command(engine: Any, name: str, arguments: dict[str, Any]) -> Any:
    """Run one of `commands` in the engine core of an LLMEngine.

    Raises:
        CommandError: the command's.
    """
    _check_config(engine.vllm_config)
    return commands.call(engine, name, arguments)


async def command_async(engine: Any, name: str, arguments: dict[str, Any]) -> Any:
    """Run one of `commands` in the engine core of an AsyncLLM.

    Raises:
        CommandError: the command's.
    """
    _check_config(engine.vllm_config)
    return await commands.call_async(engine, name, arguments)


def id_of_tokens(token_ids: Sequence[int], plan: ModulePlan | None = None) -> str:
    """The id of a pin that is given none."""
    text = ",".join(map(str, token_ids)) + (plan.to_argument() if plan else "")
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _check_config(vllm_config: VllmConfig) -> None:
    from vllm_relay.config import scheduler_is_selected

    if not scheduler_is_selected(vllm_config):
        raise CommandError(501, "prompts are pinned by RelayScheduler only: " + HOW_TO_SELECT)
    commands.check_one_engine(vllm_config, "prompts can be pinned")


def _declaration(pin_id: str, token_ids: Sequence[int], plan: ModulePlan | None) -> dict[str, Any]:
    argument = None if plan is None else plan.to_argument()
    return {"pin_id": pin_id, "token_ids": list(token_ids), "plan": argument}


def _prompt(
    token_ids: Sequence[int], declared: dict[str, Any], plan: ModulePlan | None
) -> dict[str, Any]:
    if plan is not None:
        return {"prompt_token_ids": list(token_ids)}
    # no token that the blocks do not need: with sliding windows it could push the first ones out
    return {"prompt_token_ids": list(token_ids[: declared["prompt_tokens"]])}


def _params(pin_id: str, plan: ModulePlan | None) -> SamplingParams:
    from vllm import SamplingParams

    extra_args: dict[str, Any] = {EXTRA_ARG: pin_id}
    if plan is not None:
        extra_args[PLAN_ARG] = plan.to_argument()
    return SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, extra_args=extra_args)


def _request_id(pin_id: str) -> str:
    return f"relay-pin-{pin_id}-{uuid.uuid4().hex[:8]}"


def _pin_of(entry: dict[str, Any]) -> Pin:
    return Pin(**{name: entry[name] for name in Pin.__dataclass_fields__})


def _resident(pin: Pin) -> Pin:
    if pin.resident:
        return pin
    raise CommandError(
        507 if pin.problem else 409,
        pin.problem
        or f"the request that computed pin {pin.id!r} ended without having computed all of it: "
        "try again",
    )
