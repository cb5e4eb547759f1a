# SPDX-License-Identifier: Apache-2.0
"""When a request is made again, and when a server counts as gone."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime


@dataclass(frozen=True)
class RetryPolicy:
    """
    Attributes:
        max_retries: of a prompt whose requests fail, by themselves or in a server that is there.
        max_passed_over: how often a prompt may be turned away while others are answered.
        max_failed_in_a_row: prompts that fail one after the other, until the server counts as
            broken.
        max_refused_in_a_row: prompts that are refused one after the other, until a short one is
            asked instead: a server that refuses it too refuses all.
        first_delay_s: before the first retry; twice as long before each further one.
        max_delay_s: before any retry; a server may ask for more.
        patience_s: how long a server may be away, or turn all requests away, until it counts as
            gone.

    Raises:
        ValueError: a number is below 0.
    """

    max_retries: int = 4
    max_passed_over: int = 30
    max_failed_in_a_row: int = 32
    max_refused_in_a_row: int = 4
    first_delay_s: float = 0.5
    max_delay_s: float = 30.0
    patience_s: float = 600.0

    def __post_init__(self) -> None:
        for name in (each.name for each in fields(self)):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} given, expected at least 0")

    def delay_s(self, num_failures: int, retry_after_s: float = 0.0) -> float:
        """How long to wait after so many failures: by chance, so that requests spread."""
        longest_s = min(self.first_delay_s * 2.0 ** min(num_failures - 1, 30), self.max_delay_s)
        return retry_after_s + longest_s * random.uniform(0.5, 1.0)


def retry_after_s(header: str | None) -> float:
    """Seconds that a Retry-After header asks for, which is a number or a date; 0 without one."""
    if not header:
        return 0.0
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        moment = parsedate_to_datetime(header)
    except ValueError:
        return 0.0
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return max(0.0, (moment - datetime.now(timezone.utc)).total_seconds())
