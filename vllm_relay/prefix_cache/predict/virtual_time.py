# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine core in virtual time: each step moves the clock by what it would take.

On a shared machine the waits of a server near its capacity tell more of the neighbours than of the
scheduler. Here they depend on nothing but the requests, their arrivals and the costs of a step.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

from vllm_relay.prefix_cache.predict.step_costs import StepCosts

_MAX_IDLE_STEPS = 10_000


@dataclass
class Course:
    """What became of a request; times in seconds of the virtual clock, None: not yet.

    Tokens count once: what is computed again after a preemption is no hit.
    """

    arrived_s: float
    admitted_s: float | None = None
    """Beginning of the first step in which it ran."""
    first_token_s: float | None = None
    finished_s: float | None = None
    cached_tokens: int = 0

    def first_token_after_s(self, now_s: float) -> float:
        """From its arrival to its first token, or up to now if it has none."""
        return (now_s if self.first_token_s is None else self.first_token_s) - self.arrived_s

    def waited_s(self, now_s: float) -> float:
        """From its arrival to its admission, or up to now if it still waits."""
        return (now_s if self.admitted_s is None else self.admitted_s) - self.arrived_s


class VirtualServer:
    """Serves requests as they arrive; `core` has a `StubExecutor`, whose `sampler` is set."""

    def __init__(self, core: EngineCore, costs: StepCosts) -> None:
        self.now_s = 0.0
        self.steps = 0
        self.courses: dict[str, Course] = {}
        """By request id, in the order of arrival."""
        self._core = core
        self._costs = costs
        self._idle_steps = 0
        use_clock = getattr(core.scheduler, "use_clock", None)  # vLLM's asks for no time
        if use_clock is not None:
            use_clock(lambda: self.now_s)

    @property
    def is_busy(self) -> bool:
        """Whether there are requests that have not finished."""
        return self._core.scheduler.has_requests()

    def serve(
        self,
        requests: Sequence[Request],
        arrivals_s: Sequence[float],
        *,
        until_s: float = float("inf"),
        on_progress: Callable[[int], None] = lambda finished: None,
    ) -> None:
        """Serve all requests, or those for which there is time: no step begins after `until_s`.

        Args:
            arrivals_s: of the requests, ascending; several may arrive at once.
            on_progress: called after every step with the number of finished requests.

        Raises:
            ValueError: the scheduler lets all requests wait for ever.
        """
        added = finished = 0
        gc.freeze()  # EngineCore.shutdown undoes it
        while added < len(requests) or self.is_busy:
            if not self.is_busy:
                self.now_s = max(self.now_s, arrivals_s[added])
            while added < len(requests) and arrivals_s[added] <= self.now_s:
                self.add(requests[added], arrivals_s[added])
                added += 1
            if self.now_s >= until_s:
                return
            finished += sum(output.finished for output in self.step())
            on_progress(finished)

    def add(self, request: Request, arrival_s: float) -> None:
        """A request arrives."""
        request.arrival_time = arrival_s
        self.courses[request.request_id] = Course(arrival_s)
        self._core.add_request(request)

    def step(self) -> Sequence[EngineCoreOutput]:
        """Move the clock by one step; returns what comes of it then.

        Raises:
            ValueError: the scheduler lets all requests wait for ever.
        """
        executor: Any = self._core.model_executor
        outputs, did_run = self._core.step()
        step = executor.last_step
        for new in step.scheduled_new_reqs:
            self.courses[new.req_id].admitted_s = self.now_s
        waiting = self._core.scheduler.get_num_unfinished_requests()
        if did_run or waiting:
            self.now_s += self._costs.seconds(step.total_num_scheduled_tokens)
        self.steps += did_run
        self._idle_steps = 0 if did_run else self._idle_steps + 1
        if self._idle_steps > _MAX_IDLE_STEPS:
            raise ValueError(f"the scheduler runs none of {waiting} waiting requests")
        came = outputs[0].outputs if outputs else ()
        for output in came:
            course = self.courses[output.request_id]
            if output.prefill_stats is not None:
                course.cached_tokens = output.prefill_stats.num_cached_tokens
            if output.new_token_ids and course.first_token_s is None:
                course.first_token_s = self.now_s
            if output.finished:
                course.finished_s = self.now_s
        return came
