# SPDX-License-Identifier: Apache-2.0
"""The driver's side of an actor."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from vllm_relay.tables.engines.base import (
    Completions,
    EngineError,
    Prompt,
    PromptShape,
    most_answer_tokens,
)
from vllm_relay.tables.engines.ray_actors.replica import ReplicaFacts
from vllm_relay.tables.question import Question

_WAIT_S = 1.0
_WAIT_WITH_ROOM_S = 0.1
_CLOSE_TIMEOUT_S = 10.0


class RayEngine:
    """An `Engine` that a `Replica` holds.

    Args:
        actor: the replica, which `close` ends.
        tokenizer: of the model; None if it has none.
        reply_timeout_s: of the actor, which replies at once, whatever its engine does.
    """

    def __init__(
        self,
        actor: Any,
        facts: ReplicaFacts,
        tokenizer: Any | None,
        name: str,
        reply_timeout_s: float,
    ) -> None:
        self._actor = actor
        self._name = name
        self._reply_timeout_s = reply_timeout_s
        self.identity = facts.identity
        self.cache = facts.cache
        self.max_model_len = facts.max_model_len
        self.max_running = facts.max_running
        self.reasons = facts.reasons
        self.model_name = facts.model_name
        self.tokenizer = tokenizer

    def generate(self, prompts: Iterable[Prompt], question: Question) -> Completions:
        """See `Engine`. Beyond `max_running`, a quarter as many prompts are given ahead of time:
        few enough that replicas end together."""
        return self._run(prompts, question, is_scored=False)

    def generate_scored(self, prompts: Iterable[Prompt], question: Question) -> Completions:
        return self._run(prompts, question, is_scored=True)

    def _run(
        self, prompts: Iterable[Prompt], question: Question, *, is_scored: bool
    ) -> Completions:
        max_outstanding = self.max_running + max(1, self.max_running // 4)
        source = iter(prompts)
        num_outstanding = 0
        # answers are checked here; the model of a check may not be known there
        question = replace(question, output=replace(question.output, check=None))
        job = self._ask("begin", question, is_scored)
        try:
            while True:
                batch = list(islice(source, max_outstanding - num_outstanding))
                num_outstanding += len(batch)
                if not num_outstanding:
                    return
                has_room = num_outstanding < max_outstanding
                wait_s = _WAIT_WITH_ROOM_S if has_room else _WAIT_S
                completions = self._ask("exchange", job, batch, wait_s)
                num_outstanding -= len(completions)
                yield from completions
        finally:
            if ray.is_initialized():
                self._actor.end.remote(job)

    def max_answer_tokens(self, question: Question) -> int:
        return most_answer_tokens(question, reasons=self.reasons)

    def prompts_per_s(self, shape: PromptShape, question: Question) -> float | None:
        return self._ask("prompts_per_s", shape, question)

    def close(self) -> None:
        """End the actor and its engine; more calls do nothing."""
        if not ray.is_initialized():
            return
        with suppress(RayError):
            ray.get(self._actor.close.remote(), timeout=_CLOSE_TIMEOUT_S)
        with suppress(RayError):
            ray.kill(self._actor)

    def _ask(self, method: str, *arguments: Any) -> Any:
        """
        Raises:
            EngineError: the actor or its engine is gone.
            ValueError: the engine refuses the question.
        """
        if not ray.is_initialized():
            # which asking would start anew
            raise EngineError(f"{self._name} is gone: Ray was ended")
        reply = getattr(self._actor, method).remote(*arguments)
        timeout_s = None if method == "prompts_per_s" else self._reply_timeout_s
        return reply_of(reply, self._name, timeout_s)


def reply_of(reply: Any, name: str, timeout_s: float | None = None) -> Any:
    """What an actor replies.

    Raises:
        EngineError: the actor is gone, or raised one.
        ValueError: the actor raised one.
    """
    try:
        return ray.get(reply, timeout=timeout_s)
    except RayTaskError as error:
        if isinstance(error.cause, (EngineError, ValueError)):
            raise error.cause from None
        raise EngineError(f"{name} failed: {error}") from error
    except TimeoutError as error:
        raise EngineError(f"{name} has not replied for {timeout_s:g} s") from error
    except RayError as error:
        reason = str(error).strip().partition("\n")[0]
        raise EngineError(f"{name} is gone: {reason or type(error).__name__}") from error
