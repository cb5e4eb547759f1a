# SPDX-License-Identifier: Apache-2.0
"""How far the order of waiting requests may depart from the order of arrival, and how many of them
have been overtaken."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from vllm_relay.ranked import Ranked

R = TypeVar("R", bound=Hashable)


@dataclass(slots=True)
class _Wait:
    number: int  # how many requests arrived before this one
    window_end: int | None = None
    """The number of the last request that may overtake it; None before anybody ran."""
    turn: int = 0  # how many will have run when it would have had its turn in the order of arrival
    turn_s: float | None = None  # when that was; None before


@dataclass
class OvertakeLimit(Generic[R]):
    """Bounds how many later requests run before an earlier one, and tells who is late.

    docs/scheduler.md ("Fairness") has the rule and its proof. Those who wait beside a request when
    the first one is run after it could include those that are set aside.

    Args:
        max_hold_s: a request is late this many seconds after its turn in the order of arrival; 0
            keeps that order.
        max_overtakes: the constant above, and a request is late when so many have run since its
            turn; 0 keeps the order of arrival.
    """

    max_hold_s: float
    max_overtakes: int
    _waits: dict[R, _Wait] = field(default_factory=dict, init=False)
    _aside: dict[R, _Wait] = field(default_factory=dict, init=False)
    _new: dict[R, _Wait] = field(default_factory=dict, init=False)  # nobody has run since
    _turns: deque[_Wait] = field(default_factory=deque, init=False)  # to come
    _ends: Ranked[R] = field(default_factory=Ranked, init=False)
    """Those that wait and have a window, by `window_end`."""
    _numbers: Ranked[R] = field(default_factory=Ranked, init=False)  # all that wait, by number
    _num_arrived: int = field(default=0, init=False)
    _num_run: int = field(default=0, init=False)

    def __len__(self) -> int:
        """How many wait, and how many were set aside."""
        return len(self._waits) + len(self._aside)

    def arrive(self, request: R) -> int:
        """A request begins to wait, or waits again after it was set aside; returns its number."""
        wait = self._aside.pop(request, None)
        if wait is None:
            wait = self._next_wait()
        self._waits[request] = wait
        self._numbers.add(request, wait.number)
        if wait.window_end is None:
            self._new[request] = wait
        else:
            self._ends.add(request, wait.window_end)
        return wait.number

    def arrive_aside(self, request: R) -> None:
        """A request arrives that cannot run yet: as if it were set aside at once."""
        if request not in self._aside:
            self._aside[request] = self._next_wait()

    def set_aside(self, request: R) -> None:
        """It was a request's turn, but it cannot run now; it keeps its place in the order of
        arrival, and others that run meanwhile do not overtake it."""
        self._open()
        self._aside[request] = self._forget(request)

    def leave(self, request: R) -> None:
        """A request waits no longer, or is no longer set aside, and did not run."""
        self._aside.pop(request, None)
        if request in self._waits:
            self._forget(request)
            self._new.pop(request, None)

    def run(self, request: R, now_s: float) -> bool:
        """A request waits no longer and runs; returns whether it overtakes one."""
        self._open()
        number = self._forget(request).number
        self._num_run += 1
        while self._turns and self._turns[0].turn <= self._num_run:
            self._turns.popleft().turn_s = now_s
        oldest = self._numbers.first()
        return oldest is not None and self.number(oldest) < number

    def tightest(self) -> R | None:
        """Whom the fewest may overtake from now on; None if nobody waits who may be overtaken."""
        return self._ends.first()

    def is_within(self, number: int) -> bool:
        """Whether a request with this number may run next, whoever waits."""
        tightest = self._ends.first()
        return tightest is None or number <= self._ends.rank(tightest)

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

    def _next_wait(self) -> _Wait:
        wait = _Wait(self._num_arrived)
        self._num_arrived += 1
        if not self.max_hold_s or not self.max_overtakes:
            wait.window_end = wait.number
        return wait

    def _open(self) -> None:
        """Those that could run, and before which nobody ran, may be overtaken from now on."""
        if not self._new:
            return
        older = len(self._waits) - len(self._new) + len(self._aside)
        others = len(self._waits) - 1 + len(self._aside)
        for request in sorted(self._new, key=self.number):
            wait = self._new[request]
            wait.turn = self._num_run + others
            self._turns.append(wait)
            wait.window_end = self._num_arrived - 1 + older + self.max_overtakes
            self._ends.add(request, wait.window_end)
            older += 1
        self._new.clear()

    def _forget(self, request: R) -> _Wait:
        """A request that waits does so no longer."""
        wait = self._waits.pop(request)
        self._numbers.discard(request)
        self._ends.discard(request)
        return wait


class OvertakenCount:
    """Counts waiting requests after which came one that has run before them, by their positions:
    how many came before. Nobody that waits is looked at: how many came after the last one to run
    follows from who of these left."""

    def __init__(self) -> None:
        self._waiting: set[int] = set()
        self._num_arrived = 0
        self._latest_run = -1  # of those that have run, the one that came last
        self._left: Ranked[int] = Ranked()  # came later, and wait no longer

    @property
    def count(self) -> int:
        num_later = self._num_arrived - 1 - self._latest_run - len(self._left)
        return len(self._waiting) - num_later - (self._latest_run in self._waiting)

    def waits(self, position: int) -> None:
        """A request waits, or waits again."""
        self._num_arrived = max(self._num_arrived, position + 1)
        self._waiting.add(position)
        self._left.discard(position)

    def waits_no_longer(self, position: int, runs: bool) -> None:
        self._waiting.discard(position)
        if runs:
            self._latest_run = max(self._latest_run, position)
        else:
            self._left.add(position, position)
        while (left := self._left.first()) is not None and left <= self._latest_run:
            self._left.discard(left)
