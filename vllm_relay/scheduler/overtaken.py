# SPDX-License-Identifier: Apache-2.0
"""How many of those that wait have been overtaken."""

from __future__ import annotations

from vllm_relay.ranked import Ranked


class OvertakenCount:
    """Counts waiting requests after which came one that has run before them.

    A position says how many came before; all of them wait, one after the other. Nobody that waits
    is looked at: how many came after the last one to run follows from who of these left.
    """

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
        elif position > self._latest_run:
            self._left.add(position, position)
        while (left := self._left.first()) is not None and left <= self._latest_run:
            self._left.discard(left)
