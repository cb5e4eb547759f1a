# SPDX-License-Identifier: Apache-2.0
"""How far the order of waiting requests may depart from the order of arrival."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

R = TypeVar("R", bound=Hashable)


@dataclass(slots=True)
class _Wait:
    """
    Attributes:
        number: how many requests arrived before this one.
        window_end: the number of the last request that may overtake it; None before anybody ran.
        turn: how many will have run when it would have had its turn in the order of arrival.
        turn_s: when that was; None before.
    """

    number: int
    window_end: int | None = None
    turn: int = 0
    turn_s: float | None = None


@dataclass
class OvertakeLimit(Generic[R]):
    """Bounds how many later requests run before an earlier one, and tells who is late.

    Let n others wait when the first request is run after one has arrived. That one is overtaken at
    most n + max_overtakes times: it may change places with the next n + max_overtakes that arrive,
    and with none after these (`window_end`). As at most n run that are older, it is among the first
    2 n + max_overtakes + 1 to run: in the order of arrival it would be among the first n + 1.
    Requests that arrive together, before anybody runs, count for each other: nobody could tell
    their order.

    Args:
        max_hold_s: a request is late this many seconds after its turn in the order of arrival; 0
            keeps that order.
        max_overtakes: the constant above, and a request is late when so many have run since its
            turn; 0 keeps the order of arrival.
    """

    max_hold_s: float
    max_overtakes: int
    _waits: dict[R, _Wait] = field(default_factory=dict, init=False)  # by number, but who came back
    _aside: dict[R, _Wait] = field(default_factory=dict, init=False)
    _new: dict[R, _Wait] = field(default_factory=dict, init=False)  # nobody has run since
    _turns: deque[tuple[R, _Wait]] = field(default_factory=deque, init=False)  # to come
    _ends: list[tuple[int, int, int, R]] = field(default_factory=list, init=False)
    """Heap: `window_end`, number, serial number and request of those that wait, and of others."""
    _oldest: list[tuple[int, int, R]] = field(default_factory=list, init=False)  # as `_ends` is
    _serial: Iterator[int] = field(default_factory=itertools.count, init=False)
    _num_arrived: int = field(default=0, init=False)
    _num_run: int = field(default=0, init=False)

    def __len__(self) -> int:
        """How many wait, and how many were set aside."""
        return len(self._waits) + len(self._aside)

    def arrive(self, request: R) -> int:
        """A request begins to wait, or waits again after it was set aside; returns its number."""
        wait = self._aside.pop(request, None)
        if wait is None:
            wait = _Wait(self._num_arrived)
            self._num_arrived += 1
            self._new[request] = wait
            if not self.max_hold_s or not self.max_overtakes:
                wait.window_end = wait.number
        self._waits[request] = wait
        heapq.heappush(self._oldest, (wait.number, next(self._serial), request))
        if wait.window_end is not None:
            self._push_end(wait.window_end, wait.number, request)
        return wait.number

    def set_aside(self, request: R) -> None:
        """It was a request's turn, but it cannot run now; it keeps its place in the order of
        arrival, and others that run meanwhile do not overtake it."""
        self._open()
        self._aside[request] = self._waits.pop(request)

    def leave(self, request: R) -> None:
        """A request waits no longer, or is no longer set aside, and did not run."""
        self._new.pop(request, None)
        self._waits.pop(request, None)
        self._aside.pop(request, None)

    def run(self, request: R, now_s: float) -> bool:
        """A request waits no longer and runs; returns whether it overtakes one."""
        self._open()
        number = self._waits.pop(request).number
        self._num_run += 1
        while self._turns and self._turns[0][1].turn <= self._num_run:
            self._turns.popleft()[1].turn_s = now_s
        oldest = self._oldest
        while oldest and not self._is_waiting(oldest[0][2], oldest[0][0]):
            heapq.heappop(oldest)
        return bool(oldest) and oldest[0][0] < number

    def tightest(self) -> R | None:
        """Whom the fewest may overtake from now on; None if nobody waits who may be overtaken."""
        ends = self._ends
        while ends and not self._is_waiting(ends[0][3], ends[0][1]):
            heapq.heappop(ends)
        return ends[0][3] if ends else None

    def is_within(self, number: int) -> bool:
        """Whether a request with this number may run next, whoever waits."""
        request = self.tightest()
        if request is None:
            return True
        wait = self._waits[request]
        assert wait.window_end is not None
        return number <= max(wait.number, wait.window_end)

    def number(self, request: R) -> int:
        """How many arrived before one that waits."""
        return self._waits[request].number

    def is_late(self, request: R, now_s: float) -> bool:
        """Whether one that waits would have run long ago in the order of arrival."""
        wait = self._waits[request]
        if wait.turn_s is None:
            return False
        return (
            now_s - wait.turn_s >= self.max_hold_s
            or self._num_run - wait.turn >= self.max_overtakes
        )

    def _push_end(self, window_end: int, number: int, request: R) -> None:
        heapq.heappush(self._ends, (window_end, number, next(self._serial), request))

    def _is_waiting(self, request: R, number: int) -> bool:
        wait = self._waits.get(request)
        return wait is not None and wait.number == number

    def _open(self) -> None:
        """Those that arrived since the last one ran may be overtaken from now on."""
        others = len(self._waits) - 1
        older = len(self._waits) - len(self._new)
        for request, wait in self._new.items():
            wait.turn = self._num_run + others
            self._turns.append((request, wait))
            if wait.window_end is None:
                wait.window_end = self._num_arrived - 1 + older + self.max_overtakes
                self._push_end(wait.window_end, wait.number, request)
            older += 1
        self._new.clear()
