# SPDX-License-Identifier: Apache-2.0
"""Contenders timed in turn."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Timing:
    """Seconds per call of one contender in every round."""

    samples_s: list[float]

    @property
    def median_s(self) -> float:
        return statistics.median(self.samples_s)

    @property
    def median_ms(self) -> float:
        return self.median_s * 1e3

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a fraction of the median."""
        if len(self.samples_s) < 3:
            return 0.0
        low, _, high = statistics.quantiles(self.samples_s, n=4, method="inclusive")
        return (high - low) / 2 / self.median_s


def ratio(slower: Timing, faster: Timing) -> float:
    """How many times faster: the median of the ratios of neighbouring measurements."""
    return statistics.median(a / b for a, b in zip(slower.samples_s, faster.samples_s, strict=True))


def interleaved(
    contenders: dict[str, Callable[[], Any]],
    rounds: int,
    min_sample_s: float = 2e-3,
    prepare: Callable[[], None] = lambda: None,
) -> dict[str, Timing]:
    """Times contenders in turn, round after round, so that all meet the same disturbances.

    A sample repeats a short call until it takes about `min_sample_s`; `prepare` is called before
    it. Every second round goes backwards.
    """
    repeats = {}
    for name, call in contenders.items():
        call()
        began_s = time.perf_counter()
        call()
        once_s = time.perf_counter() - began_s
        repeats[name] = max(1, min(1000, round(min_sample_s / max(once_s, 1e-7))))
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for index in range(rounds):
        for name in list(contenders)[:: -1 if index % 2 else 1]:
            call = contenders[name]
            prepare()
            began_s = time.perf_counter()
            for _ in range(repeats[name]):
                call()
            samples[name].append((time.perf_counter() - began_s) / repeats[name])
    return {name: Timing(values) for name, values in samples.items()}


def fraction(value: float, of: float | None) -> float | None:
    return None if not of else value / of
