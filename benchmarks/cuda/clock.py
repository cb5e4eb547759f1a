# SPDX-License-Identifier: Apache-2.0
"""The time a run may take, and what of it is left to the part that runs."""

import time


class Clock:
    """Parts get their budgets one after the other; what one leaves the next may use.

    Args:
        total_s: for the whole run, from `began_unix_s` on.
    """

    def __init__(self, total_s: float, began_unix_s: float) -> None:
        self.total_s, self.began_unix_s = total_s, began_unix_s
        self._planned_s = 0.0
        self._part_end_s = total_s

    @property
    def elapsed_s(self) -> float:
        return time.time() - self.began_unix_s

    def allow(self, budget_s: float) -> None:
        """Adds to what the parts so far may take together."""
        self._planned_s += budget_s
        self._part_end_s = min(self.total_s, self._planned_s)

    @property
    def left_s(self) -> float:
        """For the part that runs; negative when it should have ended."""
        return self._part_end_s - self.elapsed_s

    def has(self, expected_s: float = 0.0) -> bool:
        """Whether something that takes so long still fits."""
        return self.left_s > expected_s

    @property
    def total_left_s(self) -> float:
        return self.total_s - self.elapsed_s
