# SPDX-License-Identifier: Apache-2.0
"""A limit on what jobs may spend."""

from __future__ import annotations

import pyarrow as pa


class TokenBudgetError(RuntimeError):
    """There are prompts left, but no tokens to run them with.

    Args:
        reason: what is spent, and how far the job came.
        advice: where the answers that came are, and what to do.
        limit: the part of the reason that is true of every row.

    Attributes:
        reason, limit: as given.
        answers: of all rows of a table, see `ask`; None elsewhere.
    """

    def __init__(self, reason: str, advice: str, limit: str) -> None:
        super().__init__(f"{reason}; {advice}")
        self.reason = reason
        self.limit = limit
        self.answers: pa.Table | None = None

    @property
    def of_unasked(self) -> str:
        """The error of a row that was not asked about."""
        return f"not asked: {self.limit}"


class TokenBudget:
    """Prompts run only where their tokens and the longest possible answer are within the limit.

    Prompts that are aborted are not counted.

    Args:
        max_tokens: of prompts and answers; None has no limit.
    """

    def __init__(self, max_tokens: int | None) -> None:
        self.max_tokens = max_tokens
        self.spent_tokens = 0
        self._reserved_tokens = 0

    def reserve(self, num_tokens: int) -> bool:
        """Whether so many are left; they are then kept for this prompt."""
        if not self.has(num_tokens):
            return False
        self._reserved_tokens += num_tokens
        return True

    def has(self, num_tokens: int) -> bool:
        """Whether so many are left."""
        after = self.spent_tokens + self._reserved_tokens + num_tokens
        return self.max_tokens is None or after <= self.max_tokens

    def spend(self, num_reserved: int, num_tokens: int) -> None:
        """What a prompt took of what was reserved for it."""
        self._reserved_tokens -= num_reserved
        self.spent_tokens += num_tokens

    def release(self) -> None:
        """Nothing runs any more."""
        self._reserved_tokens = 0
