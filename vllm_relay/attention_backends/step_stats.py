# SPDX-License-Identifier: Apache-2.0
"""Counters of one engine step, their merging, and their Prometheus names."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from vllm_relay.vllm_changes.statistics import StepStats, attach_to_worker_output

if TYPE_CHECKING:
    from vllm_relay.attention_backends.groups import PlanStats

logger = logging.getLogger("vllm.relay")

COUNTERS = {
    "steps": "Engine steps whose attention relay computed.",
    "request_steps": "Requests in these steps, each counted in every step it runs in.",
    "request_steps_shared": "Of these, requests that read a prefix together with others.",
    "kv_tokens_logical": "KV tokens the requests attend to.",
    "kv_tokens_read": "KV tokens read from the cache to compute this.",
    "planning_seconds": "Seconds spent planning steps.",
}
GAUGES = {
    "forest_depth": "Levels of nested shared prefixes in the last step.",
    "groups": "Groups of requests that shared a prefix in the last step.",
}


def prometheus_name(field: str) -> str:
    """The metric's name; Prometheus appends ``_total`` to counters."""
    return f"relay:{field}"


@dataclass
class RelayStats:
    """Counters summed over ``steps`` steps; ``forest_depth`` and ``groups`` of the last one.

    Tokens, groups and planning time are summed over the model's KV cache groups. `long_contexts` is
    there with RELAY_SPARSE only.
    """

    steps: int = 0
    request_steps: int = 0
    request_steps_shared: int = 0
    kv_tokens_logical: int = 0
    kv_tokens_read: int = 0
    planning_seconds: float = 0.0
    forest_depth: int = 0
    groups: int = 0
    long_contexts: StepStats | None = None

    def add_plan(self, plan: PlanStats) -> None:
        """Add one KV cache group's plan to the statistics of the step it belongs to."""
        self.steps = max(self.steps, plan.steps)
        self.request_steps = max(self.request_steps, plan.requests)
        self.request_steps_shared = max(self.request_steps_shared, plan.requests_shared)
        self.kv_tokens_logical += plan.kv_tokens_logical
        self.kv_tokens_read += plan.kv_tokens_read
        self.planning_seconds += plan.planning_time_s
        self.forest_depth = max(self.forest_depth, plan.forest_depth)
        self.groups += plan.groups

    def merge(self, later: RelayStats) -> None:
        """Add the statistics of later steps."""
        for name in COUNTERS:
            setattr(self, name, getattr(self, name) + getattr(later, name))
        for name in GAUGES:
            setattr(self, name, getattr(later, name))
        if self.long_contexts is None:
            self.long_contexts = later.long_contexts
        elif later.long_contexts is not None:
            self.long_contexts.merge(later.long_contexts)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        saved = 1 - self.kv_tokens_read / self.kv_tokens_logical if self.kv_tokens_logical else 0
        return (
            f"{self.steps} steps, {self.request_steps} request-steps "
            f"({self.request_steps_shared} shared), "
            f"{self.kv_tokens_logical} KV tokens attended, {self.kv_tokens_read} read "
            f"({saved:.1%} saved), planning {self.planning_seconds * 1e3:.1f} ms; "
            f"last step: {self.groups} groups, depth {self.forest_depth}"
        )


class StepRecorder:
    """Collects the plans of the running step in a worker process."""

    def __init__(self) -> None:
        self._step = RelayStats()
        self.take_long_contexts: Callable[[], StepStats] | None = None
        """Gives the numbers of the running step, where a backend has any."""

    def begin_step(self) -> None:
        self._step = RelayStats()

    def add_plan(self, plan: PlanStats) -> None:
        self._step.add_plan(plan)

    def take_step(self) -> RelayStats | None:
        """Statistics of the step since :meth:`begin_step`; None if nothing was planned in it."""
        step, self._step = self._step, RelayStats()
        if step.steps == 0:
            return None
        if self.take_long_contexts is not None:
            step.long_contexts = self.take_long_contexts()
        return step


recorder = StepRecorder()


def tell_metrics() -> None:
    """Let the output of this worker carry what the recorder has; without, attention goes on."""
    try:
        attach_to_worker_output(recorder)
    except Exception:
        logger.warning("vllm-relay: the metrics relay:* are not available", exc_info=True)
