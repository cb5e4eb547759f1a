# SPDX-License-Identifier: Apache-2.0
"""Prompts answered by a server, whatever happens on the way."""

from __future__ import annotations

import asyncio
import logging
from contextlib import nullcontext
from typing import Any

from vllm_relay.tables.engines.base import Completion, EngineError, Prompt
from vllm_relay.tables.engines.server_http import (
    HttpClient,
    RequestFailed,
    RequestRefused,
    ServerAway,
)
from vllm_relay.tables.engines.server_messages import (
    ReplyError,
    common_fields,
    prompt_fields,
    read_completion,
)
from vllm_relay.tables.engines.server_models import ServedModel, served_models
from vllm_relay.tables.engines.server_retries import Availability, RetryPolicy
from vllm_relay.tables.question import Question

logger = logging.getLogger("vllm.relay")

MODELS_PATH = "/v1/models"
_WARN_AFTER_S = 10.0
_NUM_BROKEN_OF_SUSPECTS = 2
_RESUME = "start the job again when it is back: answers that it has are kept in its checkpoint"


class ServerClient:
    """Answers prompts of one question; any number at once, in one event loop.

    One of the prompts that a server has when its connections break may be why they broke. A prompt
    for which this has happened twice is a suspect, and of suspects one runs at a time: the others
    do not fail with it until they have no retries left.

    Args:
        is_chat: whether messages are sent, not tokens.
    """

    def __init__(
        self,
        http: HttpClient,
        model: ServedModel,
        question: Question,
        retries: RetryPolicy,
        *,
        is_chat: bool,
    ) -> None:
        self._http = http
        self._model = model
        self._retries = retries
        self._is_chat = is_chat
        self._path = "/v1/chat/completions" if is_chat else "/v1/completions"
        self._common_fields = common_fields(model.name, question, model.is_vllm)
        self._availability = Availability()
        self._num_failed_in_a_row = 0
        self._may_be_restarted = False
        self._has_warned = False
        self._checking = asyncio.Lock()
        self._running_suspect = asyncio.Lock()

    async def answer(self, prompt: Prompt) -> Completion:
        """
        Returns:
            With an error, if the server refuses the prompt or fails on it again and again.

        Raises:
            EngineError: the server is gone, or broken, or lets nobody in.
            ValueError: the prompt has no tokens, but tokens are to be sent.
        """
        body = self._common_fields | prompt_fields(prompt, self._is_chat)
        num_failures = num_broken = num_turned_away = num_passed_over = 0
        num_answers = self._availability.num_answers
        while True:
            try:
                is_suspect = num_broken >= _NUM_BROKEN_OF_SUSPECTS
                async with self._running_suspect if is_suspect else nullcontext():
                    completion = await self._attempt(prompt.number, body)
            except ServerAway as error:
                num_turned_away += 1
                self._note_away(error)
                num_passed_over += self._availability.num_answers > num_answers
                num_answers = self._availability.num_answers
                if num_passed_over > self._retries.max_passed_over:
                    return Completion(
                        prompt.number,
                        error=f"turned away {num_turned_away} times while others were answered: "
                        f"{error}",
                    )
                delay_s = self._retries.delay_s(num_turned_away, error.retry_after_s)
            except (RequestFailed, ReplyError) as error:
                num_failures += 1
                if isinstance(error, RequestFailed) and error.may_restart:
                    num_broken += 1
                    self._may_be_restarted = True
                if num_failures > self._retries.max_retries:
                    self._note_failed_prompt(error)
                    return Completion(
                        prompt.number, error=f"failed {num_failures} times, last: {error}"
                    )
                delay_s = self._retries.delay_s(num_failures)
            except RequestRefused as error:
                self._note_answered()
                return Completion(prompt.number, error=str(error))
            else:
                self._note_answered()
                return completion
            await asyncio.sleep(delay_s)

    async def _attempt(self, number: int, body: dict[str, Any]) -> Completion:
        if self._may_be_restarted:
            await self._check_model()
        try:
            reply = await self._http.post_json(self._path, body)
        except RequestRefused as error:
            if error.status == 404:
                self._may_be_restarted = True
                await self._check_model()
            raise
        return read_completion(number, reply, self._is_chat)

    async def _check_model(self) -> None:
        """Whether the server has the model that it had; one request checks for all."""
        async with self._checking:
            if not self._may_be_restarted:
                return
            try:
                models = served_models(await self._http.get_json(MODELS_PATH))
            except (RequestRefused, ValueError) as error:
                raise ServerAway(f"it does not say which models it has: {error}") from error
            if self._model.identity not in [each.identity for each in models]:
                raise EngineError(
                    f"the server no longer has {self._model.identity!r} but "
                    f"{[each.identity for each in models]}: {_RESUME}"
                )
            self._may_be_restarted = False

    def _note_away(self, error: ServerAway) -> None:
        self._may_be_restarted |= error.may_restart
        away_s = self._availability.turned_away()
        if max(away_s, error.retry_after_s) > self._retries.patience_s:
            waits = f", and asks to wait {error.retry_after_s:.0f} s" if error.retry_after_s else ""
            raise EngineError(
                f"the server has answered no prompt for {away_s:.0f} s{waits} ({error}): {_RESUME}"
            )
        if away_s >= _WARN_AFTER_S and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "vllm-relay: the server has answered no prompt for %.0f s (%s); waiting for it up "
                "to %.0f s",
                away_s,
                error,
                self._retries.patience_s,
            )

    def _note_answered(self) -> None:
        if self._has_warned:
            self._has_warned = False
            logger.warning("vllm-relay: the server answers prompts again")
        self._availability.answered()
        self._num_failed_in_a_row = 0

    def _note_failed_prompt(self, error: Exception) -> None:
        self._num_failed_in_a_row += 1
        if self._num_failed_in_a_row >= max(self._retries.max_failed_in_a_row, 1):
            raise EngineError(
                f"the last {self._num_failed_in_a_row} prompts failed, each "
                f"{self._retries.max_retries + 1} times, last: {error}. See the server's log, "
                f"restart it, and {_RESUME}"
            )
