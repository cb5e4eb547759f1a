# SPDX-License-Identifier: Apache-2.0
"""Pinning prompts from the front end: through an ``LLM``, an LLMEngine or an AsyncLLM.

A prompt is declared in the engine core, computed by an ordinary request for one token, and held
there when that request ends. Each data-parallel rank of an AsyncLLM has a KV cache of its own, and
does so for itself: where one fails nothing is pinned, and the others keep what they have.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from vllm_relay.arguments import is_integer
from vllm_relay.commands.compute import compute, compute_async
from vllm_relay.commands.engine import call, call_ranks_async
from vllm_relay.commands.errors import CommandError
from vllm_relay.commands.owners import PYTHON
from vllm_relay.commands.prompts import Prompt, tokens_of
from vllm_relay.modules.prompt.plan import EXTRA_ARG as PLAN_ARG
from vllm_relay.modules.prompt.plan import ModulePlan
from vllm_relay.prefix_cache.pins.pin import check_pin, digest_of
from vllm_relay.prefix_cache.pins.table import EXTRA_ARG


@dataclass(frozen=True)
class RankPin:
    """A pin in the KV cache of a data-parallel rank; `problem` says why it is not resident, if
    known."""

    rank: int
    blocks: int
    bytes: int
    resident: bool
    problem: str | None = None


@dataclass(frozen=True)
class Pin:
    """A pinned prompt.

    ``blocks`` and ``bytes`` are those of one rank, and 0 while ``resident`` is false: after a reset
    of the prefix cache, until a request computes the prompt again. With several ranks, ``resident``
    is of all, ``ranks`` of each.
    """

    id: str
    owner: str  # who pinned it, and may unpin it through HTTP
    tokens: int  # those in full KV blocks, which are what is pinned
    blocks: int
    bytes: int
    resident: bool
    problem: str | None
    expires_in_s: float | None  # seconds until it is unpinned; None: never
    ranks: list[RankPin]


@dataclass(frozen=True)
class Declaration:
    """What a front end asks each engine core for, and the request that computes it.

    Args:
        given_id: of the pin; made from its tokens if None.
        plan: of a prompt with modules; these are pinned.

    Raises:
        CommandError: 400, see `check_pin`.
    """

    token_ids: Sequence[int]
    given_id: str | None = None
    plan: ModulePlan | None = None
    owner: str = PYTHON
    ttl_s: float | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:8])

    def __post_init__(self) -> None:
        check_pin(self.pin_id, self.ttl_s)

    @cached_property
    def pin_id(self) -> str:
        return digest_of(self.token_ids, self.plan)[:12] if self.given_id is None else self.given_id

    @property
    def name(self) -> dict[str, Any]:
        return {"pin_id": self.pin_id, "declaration": self.id}

    def arguments(self) -> dict[str, Any]:
        plan = None if self.plan is None else self.plan.to_argument()
        whose = {"owner": self.owner, "ttl_s": self.ttl_s}
        return {**self.name, "token_ids": list(self.token_ids), "plan": plan, **whose}

    def tokens(self, declared: dict[str, Any]) -> Sequence[int]:
        """Those that are to be computed."""
        # no token that the blocks do not need: with sliding windows it could push the first ones
        # out
        return self.token_ids[: declared["prompt_tokens"]] if self.plan is None else self.token_ids

    def extra_args(self) -> dict[str, Any]:
        plan = {} if self.plan is None else {PLAN_ARG: self.plan.to_argument()}
        return {EXTRA_ARG: self.pin_id, **plan}

    def request_id(self) -> str:
        return f"relay-pin-{self.pin_id}-{uuid.uuid4().hex[:8]}"


def pin(llm: Any, prompt: Prompt, pin_id: str | None = None, *, ttl_s: float | None = None) -> Pin:
    """Compute a prompt and keep its full KV blocks until :func:`unpin`.

    Args:
        llm: an ``LLM`` or LLMEngine without unfinished requests.
        prompt: token ids; a text, as for ``LLM.generate``; or messages, as for ``LLM.chat``.
        pin_id: its name; made from its tokens if None. The same prompt can be pinned again.
        ttl_s: seconds after which it is unpinned; None: never.

    Raises:
        CommandError: the prompt cannot be pinned; the message says why.
        RuntimeError: the engine has unfinished requests.
    """
    engine = getattr(llm, "llm_engine", llm)
    return pin_tokens(engine, Declaration(tokens_of(llm, prompt), pin_id, ttl_s=ttl_s))


def unpin(llm: Any, pin_id: str) -> None:
    """Let a pinned prompt be evicted again; a CommandError if there is no such pin."""
    check_pin(pin_id, None)
    call(getattr(llm, "llm_engine", llm), "unpin", {"pin_id": pin_id})


def list_pins(llm: Any) -> list[Pin]:
    """The pinned prompts."""
    return _pins({0: call(getattr(llm, "llm_engine", llm), "pins", {})})


def top_prefixes(llm: Any, count: int = 10) -> list[dict[str, Any]]:
    """The prefixes with most hit tokens, most first: their id, tokens and hits.

    Raises:
        CommandError: there is no such count.
    """
    if not is_integer(count) or count < 0:
        raise CommandError(400, f"count: given {count!r}, expected an integer from 0")
    return call(getattr(llm, "llm_engine", llm), "top_prefixes", {"count": count})


def pin_tokens(engine: Any, asked: Declaration) -> Pin:
    """:func:`pin` for the tokens of a prompt and an LLMEngine."""
    if engine.has_unfinished_requests():
        raise RuntimeError(
            "a prompt cannot be pinned while the engine has unfinished requests: finish them first"
        )
    declared = call(engine, "declare_pin", asked.arguments())
    if not declared["resident"]:
        try:
            compute(engine, asked.tokens(declared), asked.request_id(), asked.extra_args())
        except BaseException:
            with contextlib.suppress(CommandError):
                call(engine, "settle_pin", asked.name)
            raise
        declared = call(engine, "settle_pin", asked.name)
    return _pin_of({0: declared})


async def pin_tokens_async(engine: Any, asked: Declaration) -> Pin:
    """:func:`pin_tokens` for an AsyncLLM, whatever else it is doing, in all its ranks."""
    answers = await call_ranks_async(engine, "declare_pin", asked.arguments())
    ranks = list(answers)
    cold = {
        rank: entry
        for rank, entry in answers.items()
        if not isinstance(entry, CommandError) and not entry["resident"]
    }

    async def compute_in(rank: int, entry: dict[str, Any]) -> CommandError | None:
        # vLLM numbers the ranks of a front end from 0
        place = ranks.index(rank) if len(ranks) > 1 else None
        request = asked.tokens(entry), asked.request_id(), asked.extra_args()
        try:
            await compute_async(engine, *request, place)
        except CommandError as error:
            return error
        return None

    if cold:
        try:
            failures = await asyncio.gather(*(compute_in(*each) for each in cold.items()))
        except BaseException:
            with contextlib.suppress(Exception):  # of an engine that has ended
                await call_ranks_async(engine, "settle_pin", asked.name)
            raise
        settled = await call_ranks_async(engine, "settle_pin", asked.name)
        for rank, failure in zip(cold, failures, strict=True):
            answers[rank] = failure or settled[rank]
    return _of_all_ranks(asked.pin_id, answers)


async def unpin_async(engine: Any, pin_id: str, owner: str | None = None) -> None:
    """:func:`unpin` for an AsyncLLM, in all its ranks.

    Args:
        owner: who asks; None: who may unpin all.

    Raises:
        CommandError: no rank has such a pin, or it is another owner's.
    """
    answers = await call_ranks_async(engine, "unpin", {"pin_id": pin_id, "owner": owner})
    errors = [answer for answer in answers.values() if isinstance(answer, CommandError)]
    if len(errors) == len(answers) or any(error.status != 404 for error in errors):
        raise max(errors, key=lambda error: error.status != 404)


async def list_pins_async(engine: Any) -> list[Pin]:
    """:func:`list_pins` for an AsyncLLM, as all its ranks have them."""
    return _pins(await call_ranks_async(engine, "pins", {}))


def _of_all_ranks(pin_id: str, answers: Mapping[int, Any]) -> Pin:
    """
    Raises:
        CommandError: of a rank; with what each rank has.
    """
    errors = {rank: each for rank, each in answers.items() if isinstance(each, CommandError)}
    if not errors:
        return _pin_of(answers)
    [status, *_] = (error.status for error in errors.values())
    if len(answers) == 1:
        raise next(iter(errors.values()))
    reasons = "; ".join(f"rank {rank}: {error}" for rank, error in errors.items())
    pinned = [str(rank) for rank in answers if rank not in errors]
    there = f"pinned in rank {', '.join(pinned)}, where it stays" if pinned else "pinned nowhere"
    raise CommandError(status, f"pin {pin_id!r} is {there}; {reasons}")


def _pin_of(entries: Mapping[int, dict[str, Any]]) -> Pin:
    """A pin, from what ranks say of it."""
    ranks = [
        RankPin(rank, entry["blocks"], entry["bytes"], entry["resident"], entry["problem"])
        for rank, entry in entries.items()
    ]
    first = next(iter(entries.values()))
    return Pin(
        id=first["id"],
        owner=first["owner"],
        tokens=first["tokens"],
        blocks=max(rank.blocks for rank in ranks),
        bytes=max(rank.bytes for rank in ranks),
        resident=all(rank.resident for rank in ranks),
        problem=next((rank.problem for rank in ranks if rank.problem), None),
        expires_in_s=first["expires_in_s"],
        ranks=ranks,
    )


def _pins(answers: Mapping[int, Any]) -> list[Pin]:
    by_id: dict[str, dict[int, dict[str, Any]]] = {}
    for rank, entries in answers.items():
        if isinstance(entries, CommandError):
            raise entries
        for entry in entries:
            by_id.setdefault(entry["id"], {})[rank] = entry
    missing = {"blocks": 0, "bytes": 0, "resident": False, "problem": "not pinned in this rank"}
    return [
        _pin_of({rank: found.get(rank, next(iter(found.values())) | missing) for rank in answers})
        for found in by_id.values()
    ]
