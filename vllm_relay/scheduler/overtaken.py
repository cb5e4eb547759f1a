# SPDX-License-Identifier: Apache-2.0
"""How many of those that wait have been overtaken."""

from __future__ import annotations


class OvertakenCount:
    """Counts waiting requests after which came one that has run before them.

    A request is looked at once while it waits, and once more when it waits no longer.
    """

    def __init__(self) -> None:
        self.count = 0
        self._waiting: set[int] = set()
        self._looked_at = 0  # positions below: whoever of them waits is overtaken

    def waits(self, position: int) -> None:
        """A request waits, or waits again: `position` says how many came before it."""
        self._waiting.add(position)
        self.count += position < self._looked_at

    def waits_no_longer(self, position: int, runs: bool) -> None:
        self._waiting.discard(position)
        self.count -= position < self._looked_at
        if runs and position > self._looked_at:
            overtaken = range(self._looked_at, position)
            self.count += sum(each in self._waiting for each in overtaken)
            self._looked_at = position
