# SPDX-License-Identifier: Apache-2.0
"""When requests arrive."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_relay.arguments import CommandLineError, is_number
from vllm_relay.prefix_cache.predict.input import InputLine, LineError
from vllm_relay.prefix_cache.predict.step_costs import StepCosts

OFFLINE, TIMESTAMPS, POISSON = "offline", "timestamps", "poisson"

_EXPECTED = "expected offline, poisson:RATE in requests per second, or timestamps"
_SEED = 0


@dataclass(frozen=True)
class Load:
    """What a step takes; and when each request arrives, ascending, in seconds.

    Without arrivals all requests are given to `LLM.generate`, with them to a server.
    """

    costs: StepCosts
    arrivals_s: Sequence[float] | None = None


def arrivals_of(option: str, lines: Sequence[InputLine]) -> list[float] | None:
    """The arrivals of the lines in seconds from the first; None if all are there at once.

    Raises:
        CommandLineError: the option is not offline, poisson:RATE or timestamps.
        LineError: a line has no timestamp, or an earlier one than the line before.
    """
    kind, _, rate = option.partition(":")
    if option == OFFLINE:
        return None
    if option == TIMESTAMPS:
        return _by_timestamps(lines)
    if kind == POISSON:
        return poisson_s(_rate_per_s(option, rate), len(lines), _SEED)
    raise CommandLineError(f"--arrivals {option}: {_EXPECTED}")


def poisson_s(per_s: float, count: int, seed: int) -> list[float]:
    """Arrivals at random with a mean rate, in seconds from 0."""
    return np.random.default_rng(seed).exponential(1 / per_s, count).cumsum().tolist()


def _rate_per_s(option: str, rate: str) -> float:
    try:
        per_s = float(rate)
    except ValueError:
        raise CommandLineError(f"--arrivals {option}: {_EXPECTED}") from None
    if not 0 < per_s < math.inf:
        raise CommandLineError(
            f"--arrivals {option}: expected a rate above 0, in requests per second: poisson:20"
        )
    return per_s


def _by_timestamps(lines: Sequence[InputLine]) -> list[float]:
    arrivals_s: list[float] = []
    for line in lines:
        arrival_s = _timestamp_s(line)
        if arrivals_s and arrival_s < arrivals_s[-1]:
            raise LineError(
                line.number,
                f"given an arrival at {arrival_s:g} s, expected none before the line above at "
                f"{arrivals_s[-1]:g} s: sort the lines by arrival",
            )
        arrivals_s.append(arrival_s)
    return [arrival_s - arrivals_s[0] for arrival_s in arrivals_s]


def _timestamp_s(line: InputLine) -> float:
    given = {"timestamp": line.timestamp, "arrival_s": line.arrival_s}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) != 1:
        what = " and ".join(given) or "no timestamp"
        raise LineError(
            line.number,
            f"given {what}, expected arrival_s in seconds, or timestamp (in milliseconds beside "
            "hash_ids, else in seconds): give one of them, or --arrivals poisson:RATE",
        )
    ((name, value),) = given.items()
    if not is_number(value) or not 0 <= value < math.inf:
        raise LineError(line.number, f"{name}: given {value!r}, expected a number from 0")
    return value / 1e3 if name == "timestamp" and line.synthetic else float(value)
