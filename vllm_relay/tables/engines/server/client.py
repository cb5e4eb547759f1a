# SPDX-License-Identifier: Apache-2.0
"""Prompts answered by a server, whatever happens on the way."""

from __future__ import annotations

import asyncio
import logging
import re
from contextlib import nullcontext
from itertools import count

from vllm_relay.tables.engines.base import Completion, EngineError, Prompt
from vllm_relay.tables.engines.server.admission import RESUME, Admission
from vllm_relay.tables.engines.server.dialect import Dialect
from vllm_relay.tables.engines.server.http import (
    HttpClient,
    RequestFailed,
    RequestRefused,
    RetryPolicy,
    ServerAway,
)
from vllm_relay.tables.engines.server.messages import ReplyError, Requests
from vllm_relay.tables.engines.server.models import ServedModel, served_models
from vllm_relay.tables.images import ImageError

logger = logging.getLogger("vllm.relay")

MODELS_PATH = "/v1/models"
_NUM_BROKEN_OF_SUSPECTS = 2
_MAX_DOUBLINGS = 4
_IMAGE_WORDS = re.compile(r"image|\bvision|multi-?modal", re.IGNORECASE)


class ServerClient:
    """Answers prompts of one question; any number at once, in one event loop.

    One of the prompts that a server has when its connections break may be why they broke. A prompt
    for which this has happened twice is a suspect, and of suspects one runs at a time: the others
    do not fail with it until they have no retries left.

    Attributes:
        dialect: as far as it is learned.
    """

    def __init__(
        self,
        http: HttpClient,
        model: ServedModel,
        requests: Requests,
        admission: Admission,
        retries: RetryPolicy,
        dialect: Dialect,
    ) -> None:
        self.dialect = dialect
        self._http = http
        self._model = model
        self._requests = requests
        self._admission = admission
        self._retries = retries
        self._is_dialect_known = False
        self._turns = count()
        self._num_failed_in_a_row = 0
        self._may_be_restarted = False
        self._takes_images = False
        self._checking = asyncio.Lock()
        self._probing = asyncio.Lock()
        self._running_suspect = asyncio.Lock()

    async def answer(self, prompt: Prompt) -> Completion:
        """
        Returns:
            With an error, if the server refuses the prompt or fails on it again and again, or an
            image of it is not there.

        Raises:
            EngineError: the server is gone, or broken, or lets nobody in, or refuses everything, or
                images.
            ValueError: the prompt has no tokens, but tokens are to be sent.
        """
        try:
            return await self._answer(prompt)
        except ImageError as error:
            return Completion(prompt.number, error=str(error))
        except EngineError:
            self._admission.close()
            raise

    async def _answer(self, prompt: Prompt) -> Completion:
        num_failures = num_broken = num_turned_away = num_passed_over = 0
        turned_away_at: int | None = None
        turn = next(self._turns)
        while True:
            is_suspect = num_broken >= _NUM_BROKEN_OF_SUSPECTS
            try:
                async with (
                    self._running_suspect if is_suspect else nullcontext(),
                    self._admission.place(turn),
                ):
                    completion = await self._attempt(prompt)
            except ServerAway as error:
                self._may_be_restarted |= error.may_restart
                num_turned_away += 1
                if turned_away_at is not None:
                    num_passed_over += self._admission.has_answered_since(turned_away_at)
                turned_away_at = self._admission.num_entered
                if num_passed_over > self._retries.max_passed_over:
                    return Completion(
                        prompt.number,
                        error=f"turned away {num_turned_away} times while others were answered: "
                        f"{error}",
                    )
                # the server itself is left alone by `Admission`
                delay_s = self._retries.delay_s(min(num_turned_away, _MAX_DOUBLINGS))
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
                self._num_failed_in_a_row = 0
                await self._check_whether_all_are_refused(prompt, error)
                return Completion(prompt.number, error=str(error))
            else:
                self._num_failed_in_a_row = 0
                return completion
            await asyncio.sleep(delay_s)

    async def _attempt(self, prompt: Prompt) -> Completion:
        while True:
            if self._may_be_restarted:
                await self._check_model()
            if self._requests.has_images and not self._takes_images:
                await self._check_images(prompt)
            dialect = self.dialect
            try:
                reply = await self._http.post_json(
                    self._requests.path, self._requests.body(prompt, dialect)
                )
            except RequestRefused as error:
                if error.status == 404:
                    self._may_be_restarted = True
                    await self._check_model()
                if not self._learns(dialect, error):
                    raise
            else:
                completion = self._requests.read(prompt.number, reply, dialect)
                self._is_dialect_known = True
                return completion

    def _learns(self, dialect: Dialect, error: RequestRefused) -> bool:
        """Whether there is another dialect to try."""
        if dialect != self.dialect:
            return True
        if self._is_dialect_known:
            return False
        better = self._requests.after_refusal(dialect, str(error))
        if better is None:
            return False
        logger.warning("vllm-relay: the server refuses requests as they are (%s): it is sent %s, "
                       "response_format: %s", error, better.limit_name, better.format)  # fmt: skip
        self.dialect = better
        return True

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
                    f"{[each.identity for each in models]}: {RESUME}"
                )
            self._may_be_restarted = False

    async def _check_images(self, prompt: Prompt) -> None:
        """Ask about a small image before any other; one request checks for all."""
        async with self._checking:
            if self._takes_images:
                return
            probe = self._requests.body(prompt, self.dialect, is_probe=True)
            try:
                await self._http.post_json(self._requests.path, probe)
            except RequestRefused as error:
                if error.status != 404 and _IMAGE_WORDS.search(str(error)):
                    raise EngineError(
                        f"the server's model {self._model.name!r} takes no images ({error}): serve "
                        f"one that does, or leave images out"
                    ) from error
            self._takes_images = True

    async def _check_whether_all_are_refused(self, prompt: Prompt, error: RequestRefused) -> None:
        async with self._probing:
            if not self._admission.is_suspended:
                return
            probe = self._requests.body(prompt, self.dialect, is_probe=True)
            has_answered = True
            try:
                await self._http.post_json(self._requests.path, probe)
            except RequestRefused as again:
                raise EngineError(
                    f"the server refuses every prompt, also a short one without data ({again}); "
                    f"last: {error}"
                ) from error
            except (ServerAway, RequestFailed):
                has_answered = False
            self._admission.resume(has_answered)

    def _note_failed_prompt(self, error: Exception) -> None:
        self._num_failed_in_a_row += 1
        if self._num_failed_in_a_row >= max(self._retries.max_failed_in_a_row, 1):
            raise EngineError(
                f"the last {self._num_failed_in_a_row} prompts failed, each "
                f"{self._retries.max_retries + 1} times, last: {error}. See the server's log, "
                f"restart it, and {RESUME}"
            )
