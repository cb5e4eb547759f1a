# SPDX-License-Identifier: Apache-2.0
"""How far later requests may overtake earlier ones that wait."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

R = TypeVar("R", bound=Hashable)


@dataclass
class OvertakeLimit(Generic[R]):
    """Says when the request that has waited longest must run next.

    A request is overtaken when one that began to wait later runs. Whoever overtakes a request
    overtakes all that wait longer, too, so the first has always been overtaken longest and most
    often, and a bound on it bounds all.

    Args:
        max_hold_s: longest time between the first overtaking of a request and its turn.
        max_overtakes: most requests that may overtake one.
    """

    max_hold_s: float
    max_overtakes: int
    _waiting: OrderedDict[R, int] = field(default_factory=OrderedDict, init=False)
    _numbers: Iterator[int] = field(default_factory=itertools.count, init=False)
    _ahead: list[int] = field(default_factory=list, init=False)  # heap of those that overtook
    _records: deque[tuple[int, float]] = field(default_factory=deque, init=False)
    """Number and time of every request that was younger than all that ran before it: the first one
    younger than a given number was the first to overtake it."""

    def arrive(self, request: R) -> None:
        """A request begins to wait."""
        self._waiting[request] = next(self._numbers)

    def leave(self, request: R) -> None:
        """A request waits no longer and did not run: it was aborted or set aside."""
        del self._waiting[request]

    def run(self, request: R, now_s: float) -> bool:
        """A request waits no longer and runs; returns whether it overtakes one."""
        number = self._waiting.pop(request)
        first = next(iter(self._waiting.values()), None)
        if first is None or number < first:
            return False
        heapq.heappush(self._ahead, number)
        if not self._records or number > self._records[-1][0]:
            self._records.append((number, now_s))
        return True

    def urgent(self, now_s: float) -> R | None:
        """The request that may not be overtaken again; None while the order is free."""
        if not self._waiting:
            return None
        request, number = next(iter(self._waiting.items()))
        while self._records and self._records[0][0] < number:
            self._records.popleft()
        while self._ahead and self._ahead[0] < number:
            heapq.heappop(self._ahead)
        overtaken_s = now_s - self._records[0][1] if self._records else 0.0
        late = overtaken_s >= self.max_hold_s and (self._records or self.max_hold_s == 0)
        return request if late or len(self._ahead) >= self.max_overtakes else None
