# SPDX-License-Identifier: Apache-2.0
"""Engines that take turns, step by step: what disturbs one step disturbs that of the other too."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from vllm_relay.demo.engine import EngineSettings
from vllm_relay.demo.engine_process import EngineProcess

PAUSE_S = 0.02
"""Before each step: threads of the other engine have stopped to poll for work then."""


class AlternatingEngine(EngineProcess):
    """An engine that does what it is told to, one step at a time."""

    def __init__(self, name: str, settings: EngineSettings, log_path: Path) -> None:
        super().__init__(
            name, "benchmarks.long_context.alternating_engine_main", settings, log_path
        )

    def begin(self, prompts: list[list[int]], output_tokens: int) -> None:
        """All prompts are there before the first step."""
        self.order(prompts, output_tokens)
        self.wait()

    def step(self) -> float | None:
        """Seconds; None if there was nothing left to do."""
        self.order()
        seconds: float | None = self.wait()
        return seconds

    def end(self) -> list[list[int]]:
        """The tokens that answer each prompt."""
        self.order("end")
        token_ids: list[list[int]] = self.wait()
        return token_ids


def in_turn(
    engines: Mapping[str, AlternatingEngine], prompts: list[list[int]], output_tokens: int
) -> tuple[dict[str, list[float]], dict[str, list[list[int]]]]:
    """Answers the prompts with all engines.

    Returns:
        for each engine the seconds of its steps, and its answers.

    Raises:
        RuntimeError: they did not take equally many steps.
    """
    for engine in engines.values():
        engine.begin(prompts, output_tokens)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    order = list(engines)
    while True:
        taken = {}
        for name in order:
            time.sleep(PAUSE_S)
            taken[name] = engines[name].step()
        for name, each in taken.items():
            if each is not None:
                seconds[name].append(each)
        if None in taken.values():
            break
        order.reverse()
    if len({len(each) for each in seconds.values()}) > 1:
        counts = {name: len(each) for name, each in seconds.items()}
        raise RuntimeError(f"the engines took different numbers of steps: {counts}")
    return seconds, {name: engine.end() for name, engine in engines.items()}
