# SPDX-License-Identifier: Apache-2.0
"""What a step of the engine takes: given in options or a file, or fitted to what was measured."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path

import numpy as np

from vllm_relay.arguments import is_number


@dataclass(frozen=True)
class StepCosts:
    """What a step takes: `step_s`, and `token_s` for each token it computes, in seconds."""

    step_s: float
    token_s: float

    def seconds(self, tokens: int) -> float:
        return self.step_s + self.token_s * tokens


DEFAULT_COSTS = StepCosts(step_s=8e-3, token_s=35e-6)
"""What arithmetic gives for a model of 8 billion parameters in bfloat16 on a GPU with
3.35 TB/s and 990 TFLOP/s of which half is reached: 16 GB of weights are read in a step, and a token
takes 16 GFLOP; with 3 ms for all else of a step."""


@dataclass(frozen=True)
class StepSample:
    """What an engine did in some time.

    Attributes:
        steps: that it ran.
        tokens: that it computed in them.
        seconds: that it took.
        waits: how often nothing ran, between an answer and the next question.
    """

    steps: float
    tokens: float
    seconds: float
    waits: int = 0


def fit_costs(samples: Sequence[StepSample]) -> StepCosts:
    """The costs with which the samples are off least, each by its own time; none is below 0.

    Raises:
        ValueError: the samples are too few or too much alike to tell a step from a token.
    """
    work = np.array([[each.steps, each.tokens, each.waits] for each in samples], float)
    work = work.reshape(-1, 3)
    used = [column for column in range(3) if work[:, column].any()]
    scaled = work[:, used] / work[:, used].max(axis=0, initial=0)
    if not {0, 1} <= set(used) or np.linalg.matrix_rank(scaled, tol=1e-3) < len(used):
        raise ValueError(
            f"{len(samples)} samples given that do not tell what a step takes and what a token: "
            "measure some with few tokens a step, and some with many"
        )
    counts = work / np.array([[each.seconds] for each in samples])
    best, least = np.zeros(3), math.inf
    # of all costs that are not 0
    for chosen in (each for size in (1, 2, 3) for each in combinations(used, size)):
        found = np.zeros(3)
        found[list(chosen)] = np.linalg.lstsq(counts[:, chosen], np.ones(len(samples)))[0]
        off = float(((counts @ found - 1) ** 2).sum())
        if found.min() >= 0 and off < least:
            best, least = found, off
    return StepCosts(*best[:2].tolist())


def write_costs(path: Path, costs: StepCosts) -> None:
    path.write_text(json.dumps(asdict(costs)) + "\n")


def read_costs(path: Path) -> StepCosts:
    """
    Raises:
        ValueError: it is no file of `write_costs`.
    """
    try:
        given = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--costs {path}: cannot be read: {error}") from error
    names = ("step_s", "token_s")
    if (
        not isinstance(given, dict)
        or given.keys() != set(names)
        or not all(is_number(each) and 0 <= each < math.inf for each in given.values())
        or not any(given.values())
    ):
        raise ValueError(
            f"--costs {path}: expected an object with {' and '.join(names)}, in seconds, as "
            "vllm-relay calibrate writes it"
        )
    return StepCosts(**given)


def step_costs(
    step_ms: float | None, token_us: float | None, path: Path | None, *, has_clock: bool
) -> StepCosts | None:
    """Of options in milliseconds and microseconds, else of a file, else the defaults; None where
    nobody asks for times.

    Raises:
        ValueError: a step takes no time, or one is no number, or of no use.
    """
    if step_ms is not None and not 0 < step_ms < math.inf:
        raise ValueError(f"--step-ms {step_ms:g}: expected more than 0: what a step takes")
    if token_us is not None and not 0 <= token_us < math.inf:
        raise ValueError(f"--token-us {token_us:g}: expected 0 or more: what a token adds")
    if not has_clock:
        for option, value in (("--step-ms", step_ms), ("--token-us", token_us), ("--costs", path)):
            if value is not None:
                shown = value if isinstance(value, Path) else f"{value:g}"
                raise ValueError(
                    f"{option} {shown}: has no effect with --arrivals offline: give --arrivals "
                    "poisson:RATE or timestamps, or --replicas"
                )
        return None
    costs = DEFAULT_COSTS if path is None else read_costs(path)
    return StepCosts(
        costs.step_s if step_ms is None else step_ms / 1e3,
        costs.token_s if token_us is None else token_us / 1e6,
    )
