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

from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

from vllm_relay.prefix_cache.predict.load import StepCosts

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
        use_clock = getattr(core.scheduler, "use_clock", None)  # vLLM's asks for no time
        if use_clock is not None:
            use_clock(lambda: self.now_s)

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
        core, scheduler = self._core, self._core.scheduler
        added = finished = idle_steps = 0
        gc.freeze()  # EngineCore.shutdown undoes it
        while added < len(requests) or scheduler.has_requests():
            if not scheduler.has_requests():
                self.now_s = max(self.now_s, arrivals_s[added])
            while added < len(requests) and arrivals_s[added] <= self.now_s:
                request = requests[added]
                request.arrival_time = arrivals_s[added]
                self.courses[request.request_id] = Course(arrivals_s[added])
                core.add_request(request)
                added += 1
            if self.now_s >= until_s:
                return
            did_run, num_finished = self._step()
            finished += num_finished
            idle_steps = 0 if did_run else idle_steps + 1
            if idle_steps > _MAX_IDLE_STEPS:
                waiting = scheduler.get_num_unfinished_requests()
                raise ValueError(f"the scheduler runs none of {waiting} waiting requests")
            on_progress(finished)

    def _step(self) -> tuple[bool, int]:
        """Returns whether any request ran, and how many finished."""
        executor: Any = self._core.model_executor
        outputs, did_run = self._core.step()
        step = executor.last_step
        for new in step.scheduled_new_reqs:
            self.courses[new.req_id].admitted_s = self.now_s
        if did_run or self._core.scheduler.get_num_unfinished_requests():
            self.now_s += self._costs.seconds(step.total_num_scheduled_tokens)
        self.steps += did_run
        finished = 0
        for output in outputs[0].outputs if outputs else ():
            course = self.courses[output.request_id]
            if output.prefill_stats is not None:
                course.cached_tokens = output.prefill_stats.num_cached_tokens
            if output.new_token_ids and course.first_token_s is None:
                course.first_token_s = self.now_s
            if output.finished:
                course.finished_s = self.now_s
                finished += 1
        return did_run, finished
