# SPDX-License-Identifier: Apache-2.0
"""How far later requests may overtake earlier ones that wait."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field


@dataclass
class OvertakeLimit:
    """Says when the oldest waiting request must run next.

    A request is overtaken when one that arrived later leaves the queue to run. Whoever overtakes a
    request overtakes all older ones that wait too, so the oldest has always been overtaken longest
    and most often, and a bound on it bounds all.

    Args:
        max_hold_s: longest time between the first overtaking of a request and its turn.
        max_overtakes: most requests that may overtake one.
    """

    max_hold_s: float
    max_overtakes: int
    _waiting: set[int] = field(default_factory=set, init=False)
    _ascending: list[int] = field(default_factory=list, init=False)  # heap over _waiting
    _ahead: set[int] = field(default_factory=set, init=False)  # ran, and are younger than oldest()
    _ahead_ascending: list[int] = field(default_factory=list, init=False)
    _records: deque[tuple[int, float]] = field(default_factory=deque, init=False)
    """Position and time of every request that was younger than all that ran before it: the first
    one younger than a given position was the first to overtake it."""

    def arrive(self, position: int) -> None:
        """A request waits; `position` tells its place in the order of arrival."""
        self._ahead.discard(position)  # it comes back, and overtook nobody
        self._waiting.add(position)
        heapq.heappush(self._ascending, position)

    def leave(self, position: int) -> None:
        """A request waits no longer and did not run: it was aborted or set aside."""
        self._waiting.discard(position)

    def run(self, position: int, now_s: float) -> bool:
        """A request waits no longer and runs; returns whether it overtakes one."""
        self._waiting.discard(position)
        oldest = self.oldest()
        if oldest is None or position < oldest:
            return False
        self._ahead.add(position)
        heapq.heappush(self._ahead_ascending, position)
        if not self._records or position > self._records[-1][0]:
            self._records.append((position, now_s))
        return True

    def oldest(self) -> int | None:
        """The smallest position that waits."""
        while self._ascending and self._ascending[0] not in self._waiting:
            heapq.heappop(self._ascending)
        return self._ascending[0] if self._ascending else None

    def urgent(self, now_s: float) -> int | None:
        """The position that may not be overtaken again; None while the order is free."""
        oldest = self.oldest()
        if oldest is None:
            return None
        while self._records and self._records[0][0] < oldest:
            self._records.popleft()
        while self._ahead_ascending and self._ahead_ascending[0] < oldest:
            self._ahead.discard(heapq.heappop(self._ahead_ascending))
        overtaken_s = now_s - self._records[0][1] if self._records else 0.0
        late = overtaken_s >= self.max_hold_s and (self._records or self.max_hold_s == 0)
        return oldest if late or len(self._ahead) >= self.max_overtakes else None
