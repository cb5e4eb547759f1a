# SPDX-License-Identifier: Apache-2.0
"""How many prompts a server has at once: as many as it lets in."""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from vllm_relay.tables.engines.base import EngineError
from vllm_relay.tables.engines.server.http import RequestRefused, RetryPolicy, ServerAway

logger = logging.getLogger("vllm.relay")

RESUME = "start the job again when it is back: answers that it has are kept in its checkpoint"
_WARN_AFTER_S = 10.0
_NUM_FIRST = 4
_FIRST_S = 1.0
_GROWTH_PER_ANSWER = 1 / 8


class Admission:
    """Prompts enter by their turn, the smallest first.

    A few come first. The others follow when one is answered, or when the server has been at work
    for a second without refusing any. When several are refused in a row nobody enters until
    `resume`: a server that refuses all is asked no more often than it takes to find out.

    A server that turns a prompt away while it has others is given as many as it has, and with every
    eight answers one more. If it has none, nobody enters for as long as it asks for, then one
    prompt alone, until there is an answer.

    Args:
        max_running: prompts that the server has at most.
        retries: how long to wait for a server that is away.
    """

    def __init__(self, max_running: int, retries: RetryPolicy) -> None:
        self._max_running = max_running
        self._retries = retries
        self._limit = float(min(max_running, _NUM_FIRST))
        self._waiting: list[tuple[int, asyncio.Future[int]]] = []
        self._num_entered = 0
        self._num_running = 0
        self._has_answered = False
        self._num_refused_in_a_row = 0
        self._entered_before_refusal = 0
        self._max_refused_in_a_row = max(retries.max_refused_in_a_row, 1)
        self._latest_answered = 0
        self._is_turning_away = False
        self._away_since_s: float | None = None
        self._num_pauses = 0
        self._pause: asyncio.TimerHandle | None = None
        self._has_warned = False
        self._is_closed = False

    @property
    def num_entered(self) -> int:
        """Prompts so far, each as often as it has entered."""
        return self._num_entered

    def has_answered_since(self, num_entered: int) -> bool:
        """Whether a prompt was answered that entered after so many others."""
        return self._latest_answered > num_entered

    @asynccontextmanager
    async def place(self, turn: int) -> AsyncIterator[None]:
        """A place among those that the server has; what ends it tells about the server.

        Args:
            turn: of a prompt, which has it again when it is asked again; no other prompt has it.

        Raises:
            EngineError: it has been away for longer than the policy's patience.
        """
        entered = await self._enter(turn)
        try:
            yield
        except ServerAway as error:
            self._leave()
            self._turned_away(error)
            raise
        except RequestRefused:
            self._refused()
            self._leave()
            self._reached()
            raise
        except BaseException as error:
            self._leave()
            self._is_closed |= isinstance(error, EngineError)
            raise
        else:
            self._leave()
            self._answered(entered)
        finally:
            self._admit()

    @property
    def is_suspended(self) -> bool:
        """Whether so many were refused in a row that perhaps all are; not when that is known."""
        return not self._is_closed and self._num_refused_in_a_row >= self._max_refused_in_a_row

    def resume(self, has_answered: bool) -> None:
        """
        Args:
            has_answered: whether it is known now that the server does not refuse everything.
        """
        self._num_refused_in_a_row = 0
        if has_answered:
            self._max_refused_in_a_row *= 2
            self._open()
        self._admit()

    def close(self) -> None:
        """Nobody enters any more."""
        self._is_closed = True

    async def _enter(self, turn: int) -> int:
        loop = asyncio.get_running_loop()
        entered: asyncio.Future[int] = loop.create_future()
        heapq.heappush(self._waiting, (turn, entered))
        # not at once: those that were let in just before have not gone on yet
        loop.call_soon(self._admit)
        return await entered

    def _admit(self) -> None:
        while self._waiting and self._has_room():
            _, entered = heapq.heappop(self._waiting)
            if entered.cancelled():
                continue
            if not self._num_entered:
                asyncio.get_running_loop().call_later(_FIRST_S, self._first_are_at_work)
            self._num_entered += 1
            self._num_running += 1
            entered.set_result(self._num_entered)

    def _has_room(self) -> bool:
        if self._is_closed or self.is_suspended:
            return False
        if self._is_turning_away:
            return self._pause is None and not self._num_running
        if self._num_refused_in_a_row and not self._has_answered:
            at_most = self._max_refused_in_a_row - self._num_refused_in_a_row
            return self._num_running < min(at_most, int(self._limit))
        return self._num_running < int(self._limit)

    def _leave(self) -> None:
        self._num_running -= 1

    def _first_are_at_work(self) -> None:
        if not self._has_answered and not self._num_refused_in_a_row:
            self._limit = max(self._limit, self._max_running)
            self._admit()

    def _answered(self, entered: int) -> None:
        self._latest_answered = max(self._latest_answered, entered)
        if entered > self._entered_before_refusal:
            self._num_refused_in_a_row = 0
        self._open()
        self._limit = min(self._limit + _GROWTH_PER_ANSWER, self._max_running)
        self._reached()

    def _refused(self) -> None:
        if not self._num_refused_in_a_row:
            # an answer to what the server has already says nothing of what it does now
            self._entered_before_refusal = self._num_entered
        self._num_refused_in_a_row += 1

    def _open(self) -> None:
        if not self._has_answered:
            self._has_answered = True
            self._limit = self._max_running

    def _reached(self) -> None:
        if self._has_warned:
            self._has_warned = False
            logger.warning("vllm-relay: the server answers prompts again")
        self._is_turning_away = False
        self._away_since_s = None
        self._num_pauses = 0
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None

    def _turned_away(self, error: ServerAway) -> None:
        now_s = time.monotonic()
        if self._away_since_s is None:
            self._away_since_s = now_s
        self._is_turning_away = True
        if error.is_full:
            self._limit = max(1.0, min(self._limit, self._num_running))
        if self._num_running or self._pause is not None:
            return
        self._check_patience(now_s - self._away_since_s, error)
        self._num_pauses += 1
        pause_s = self._retries.delay_s(self._num_pauses, error.retry_after_s)
        self._pause = asyncio.get_running_loop().call_later(pause_s, self._end_pause)

    def _end_pause(self) -> None:
        self._pause = None
        self._admit()

    def _check_patience(self, away_s: float, error: ServerAway) -> None:
        patience_s = self._retries.patience_s
        if max(away_s, error.retry_after_s) > patience_s:
            waits = f", and asks to wait {error.retry_after_s:.0f} s" if error.retry_after_s else ""
            raise EngineError(
                f"the server has answered no prompt for {away_s:.0f} s{waits} ({error}): {RESUME}"
            )
        if away_s >= _WARN_AFTER_S and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "vllm-relay: the server has answered no prompt for %.0f s (%s); waiting for it up "
                "to %.0f s",
                away_s,
                error,
                patience_s,
            )
