# SPDX-License-Identifier: Apache-2.0
"""Replicas in virtual time: N of vLLM's own engine cores, their model a stub, one clock.

Where a request goes is decided by what a router can know at that moment: an answer counts when the
step that gives it has ended.
"""

from __future__ import annotations

import gc
import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

from vllm.v1.engine.core import EngineCore

from vllm_relay.cluster.replica_index import Block, block_of
from vllm_relay.prefix_cache.predict.engine import (
    CacheSize,
    PredictorSettings,
    create_config,
    create_core,
    shut_down,
)
from vllm_relay.prefix_cache.predict.input import PredictedRequest
from vllm_relay.prefix_cache.predict.requests import EngineRequests
from vllm_relay.prefix_cache.predict.step_costs import StepCosts
from vllm_relay.prefix_cache.predict.virtual_time import Course, VirtualServer


@dataclass(frozen=True)
class SimulatedRequest:
    """What a router is told of a request.

    Attributes:
        number: of the request.
        chain: the full blocks of its prompt.
        prompt_tokens: of the prompt.
        output_tokens: of its answer.
    """

    number: int
    chain: Sequence[Block]
    prompt_tokens: int
    output_tokens: int


class OnlineRouter(Protocol):
    """Chooses a replica when a request arrives."""

    def choose(self, request: SimulatedRequest, now_s: float) -> int: ...

    def answered(self, request: SimulatedRequest, replica: int) -> None:
        """Its first token came."""
        ...

    def ended(self, request: SimulatedRequest, replica: int) -> None: ...


class OfflineSource(Protocol):
    """Gives replicas requests when they have room."""

    def next(self, replica: int) -> SimulatedRequest | None: ...


@dataclass(frozen=True)
class ReplicaOutcome:
    """
    Attributes:
        requests: that it served.
        prompt_tokens, cached_tokens: of these.
        busy_s: in steps.
        busy_while_arriving_s: of these, in those that began before the last request arrived.
        ended_s: its last step, by the clock.
    """

    requests: int
    prompt_tokens: int
    cached_tokens: int
    busy_s: float
    busy_while_arriving_s: float
    ended_s: float


@dataclass(frozen=True)
class Outcome:
    """What became of the requests on their replicas."""

    replicas: Sequence[ReplicaOutcome]
    courses: Sequence[Course]
    """By request."""

    @property
    def hit_rate(self) -> float:
        prompt_tokens = sum(each.prompt_tokens for each in self.replicas)
        return sum(each.cached_tokens for each in self.replicas) / max(prompt_tokens, 1)

    @property
    def makespan_s(self) -> float:
        return max(each.ended_s for each in self.replicas)

    @property
    def imbalance(self) -> float:
        """The most that a replica works over the mean."""
        return _max_over_mean([each.busy_s for each in self.replicas])

    @property
    def imbalance_while_arriving(self) -> float:
        """The same without what is left when no more requests come, when a replica with one long
        answer still works and others have nothing to do."""
        return _max_over_mean([each.busy_while_arriving_s for each in self.replicas])


def _max_over_mean(seconds: Sequence[float]) -> float:
    return max(seconds) * len(seconds) / sum(seconds)


class _Replica:
    def __init__(self, core: EngineCore, costs: StepCosts) -> None:
        self.core = core
        self.server = VirtualServer(core, costs)
        self.is_stepping = False
        self.has_answered: set[str] = set()
        self.busy_s = 0.0
        self.busy_while_arriving_s = 0.0


class SimulatedReplicas:
    """
    Args:
        settings: of every engine.
        size: of every KV cache.
        costs: of a step.
        requests: in the order in which they arrive or are planned.
        on_progress: called after every step with the number of finished requests.

    Raises:
        ValueError: vLLM refuses the settings.
    """

    def __init__(
        self,
        settings: PredictorSettings,
        size: CacheSize,
        num_replicas: int,
        costs: StepCosts,
        requests: Sequence[PredictedRequest],
        *,
        online: bool,
        on_progress: Callable[[int], None] = lambda finished: None,
    ) -> None:
        self._on_progress = on_progress
        self._num_finished = 0
        self._last_arrival_s = 0.0
        config = create_config(settings, online=online)
        self._given = requests
        self._engine_requests = EngineRequests(requests)
        self._replicas = []
        for _ in range(num_replicas):
            # of the layers of the engine before, which nobody needs any more
            config.compilation_config.static_forward_context.clear()
            core = create_core(config, size)
            self._engine_requests.answer_by(core)
            self._replicas.append(_Replica(core, costs))
        core = self._replicas[0].core
        cache: Any = core.scheduler.kv_cache_config
        self.block_size_tokens: int = cache.cache_hit_alignment_tokens
        self.num_blocks: int = cache.num_blocks - 1
        self.max_running: int = config.scheduler_config.max_num_seqs
        self.requests = [self._described(number, core) for number in range(len(requests))]

    def __len__(self) -> int:
        return len(self._replicas)

    def close(self) -> None:
        """End the engines."""
        shut_down([replica.core for replica in self._replicas])

    def serve(self, router: OnlineRouter, arrivals_s: Sequence[float]) -> Outcome:
        """Serve requests that arrive one by one.

        Args:
            arrivals_s: of the requests, ascending.
        """
        self._last_arrival_s = max(arrivals_s, default=0.0)
        chosen: dict[int, int] = {}
        events: list[tuple[float, int, int, list[str], list[str]]] = []
        serial = count()

        def begin_step(number: int) -> None:
            self._begin_step(number, events, next(serial))

        arrived = 0
        gc.freeze()
        while arrived < len(self.requests) or events:
            if arrived < len(self.requests) and (not events or arrivals_s[arrived] <= events[0][0]):
                request, now_s = self.requests[arrived], arrivals_s[arrived]
                number = chosen[arrived] = router.choose(request, now_s)
                self._add(number, request, now_s)
                arrived += 1
                if not self._replicas[number].is_stepping:
                    begin_step(number)
                continue
            _, _, number, answered, ended = heapq.heappop(events)
            for request_id in answered:
                router.answered(self.requests[int(request_id)], number)
            for request_id in ended:
                router.ended(self.requests[int(request_id)], number)
            replica = self._replicas[number]
            replica.is_stepping = False
            if replica.server.is_busy:
                begin_step(number)
        return self._outcome()

    def run(self, source: OfflineSource, max_waiting: int) -> Outcome:
        """Let every replica take requests from a source while it has fewer than `max_waiting`."""
        num_running = [0] * len(self._replicas)
        events: list[tuple[float, int, int, list[str], list[str]]] = []
        serial = count()

        def fill(numbers: Iterable[int], now_s: float) -> None:
            """In turns, as they would be served who ask at the same time."""
            asking = dict.fromkeys(numbers)
            while asking:
                for number in list(asking):
                    has_room = num_running[number] < max_waiting
                    request = source.next(number) if has_room else None
                    if request is None:
                        del asking[number]
                    else:
                        self._add(number, request, now_s)
                        num_running[number] += 1
            for number, replica in enumerate(self._replicas):
                if replica.server.is_busy and not replica.is_stepping:
                    self._begin_step(number, events, next(serial))

        gc.freeze()
        fill(range(len(self._replicas)), 0.0)
        while events:
            now_s, _, number, _, ended = heapq.heappop(events)
            self._replicas[number].is_stepping = False
            num_running[number] -= len(ended)
            idle = [each for each, other in enumerate(self._replicas) if not other.is_stepping]
            fill(idle, now_s)
        return self._outcome()

    def _add(self, number: int, request: SimulatedRequest, now_s: float) -> None:
        replica = self._replicas[number]
        server = replica.server
        if not server.is_busy:
            server.now_s = max(server.now_s, now_s)
        server.add(self._engine_requests.request(request.number, replica.core), now_s)

    def _begin_step(
        self,
        number: int,
        events: list[tuple[float, int, int, list[str], list[str]]],
        serial: int,
    ) -> None:
        replica = self._replicas[number]
        began_s = replica.server.now_s
        outputs = replica.server.step()
        busy_s = replica.server.now_s - began_s
        replica.busy_s += busy_s
        if began_s <= self._last_arrival_s:
            replica.busy_while_arriving_s += busy_s
        answered = [
            each.request_id
            for each in outputs
            if each.new_token_ids and each.request_id not in replica.has_answered
        ]
        replica.has_answered.update(answered)
        ended = [each.request_id for each in outputs if each.finished]
        self._num_finished += len(ended)
        self._on_progress(self._num_finished)
        replica.has_answered.difference_update(ended)
        replica.is_stepping = True
        heapq.heappush(events, (replica.server.now_s, serial, number, answered, ended))

    def _outcome(self) -> Outcome:
        courses: dict[int, Course] = {}
        replicas = []
        for replica in self._replicas:
            own = {int(name): course for name, course in replica.server.courses.items()}
            courses |= own
            replicas.append(
                ReplicaOutcome(
                    len(own),
                    sum(self.requests[number].prompt_tokens for number in own),
                    sum(course.cached_tokens for course in own.values()),
                    replica.busy_s,
                    replica.busy_while_arriving_s,
                    replica.server.now_s if own else 0.0,
                )
            )
        return Outcome(replicas, [courses[number] for number in range(len(self.requests))])

    def _described(self, number: int, core: EngineCore) -> SimulatedRequest:
        request = self._engine_requests.request(number, core)
        every = self.block_size_tokens // core.scheduler.hash_block_size
        chain = [block_of(each) for each in request.block_hashes[every - 1 :: every]]
        given = self._given[number]
        return SimulatedRequest(number, chain, request.num_prompt_tokens, given.output_tokens)


@contextmanager
def simulated_replicas(*args: Any, **kwargs: Any) -> Iterator[SimulatedReplicas]:
    """See `SimulatedReplicas`; its engines end with the block."""
    replicas = SimulatedReplicas(*args, **kwargs)
    try:
        yield replicas
    finally:
        replicas.close()
