# SPDX-License-Identifier: Apache-2.0
"""Rules by which a replica is chosen, for simulations: relay's, and the usual ones beside it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from vllm_relay.cluster.buckets import BucketPrompt, PrefixBuckets
from vllm_relay.cluster.replica_index import PredictedCaches
from vllm_relay.cluster.routing import Router, ServingCosts
from vllm_relay.cluster.simulate import (
    OfflineSource,
    OnlineRouter,
    SimulatedReplicas,
    SimulatedRequest,
)
from vllm_relay.prefix_cache.predict.step_costs import StepCosts

MAX_BUFFERED = 5000


class FewestRequests:
    """The replica that has the fewest; others choose in its `pick`."""

    def __init__(self, replicas: SimulatedReplicas, costs: StepCosts) -> None:
        self.num_replicas = len(replicas)
        self.num_running = [0] * self.num_replicas

    def choose(self, request: SimulatedRequest, now_s: float) -> int:
        replica = self.pick(request)
        self.num_running[replica] += 1
        return replica

    def pick(self, request: SimulatedRequest) -> int:
        return min(range(self.num_replicas), key=self.num_running.__getitem__)

    def answered(self, request: SimulatedRequest, replica: int) -> None:
        pass

    def ended(self, request: SimulatedRequest, replica: int) -> None:
        self.num_running[replica] -= 1


class RoundRobin(FewestRequests):
    """One after the other."""

    _next = -1

    def pick(self, request: SimulatedRequest) -> int:
        self._next += 1
        return self._next % self.num_replicas


class FirstBlockHash(FewestRequests):
    """By what the first block of the prompt is, whatever the load."""

    def pick(self, request: SimulatedRequest) -> int:
        return (request.chain[0] if request.chain else 0) % self.num_replicas


class EarliestFinish:
    """Relay's, see `Router`."""

    def __init__(self, replicas: SimulatedReplicas, costs: StepCosts) -> None:
        caches = PredictedCaches([replicas.num_blocks] * len(replicas))
        serving = ServingCosts(costs.token_s, costs.token_s)
        self._router = Router(caches, serving, replicas.block_size_tokens, len(replicas))

    def choose(self, request: SimulatedRequest, now_s: float) -> int:
        return self._router.route(
            request.number, request.chain, request.prompt_tokens, request.output_tokens
        ).replica

    def answered(self, request: SimulatedRequest, replica: int) -> None:
        self._router.answered(request.number)

    def ended(self, request: SimulatedRequest, replica: int) -> None:
        self._router.ended(request.number)


class NextInLine:
    """Whoever has room takes the next request."""

    def __init__(self, replicas: SimulatedReplicas) -> None:
        self._waiting = deque(replicas.requests)

    def next(self, replica: int) -> SimulatedRequest | None:
        return self._waiting.popleft() if self._waiting else None


class Shares:
    """Each replica has a share from the beginning, as the rule says that takes arrivals."""

    def __init__(self, replicas: SimulatedReplicas, rule: FewestRequests) -> None:
        self._shares: list[deque[SimulatedRequest]] = [deque() for _ in range(len(replicas))]
        for request in replicas.requests:
            self._shares[rule.pick(request)].append(request)

    def next(self, replica: int) -> SimulatedRequest | None:
        share = self._shares[replica]
        return share.popleft() if share else None


class Buckets:
    """Relay's, see `PrefixBuckets`, where `max_buffered` requests are known at a time."""

    def __init__(self, replicas: SimulatedReplicas, max_buffered: int = MAX_BUFFERED) -> None:
        caches = PredictedCaches([replicas.num_blocks] * len(replicas))
        self._buckets: PrefixBuckets[SimulatedRequest] = PrefixBuckets(
            caches, replicas.block_size_tokens
        )
        self._waiting = deque(replicas.requests)
        self._max_buffered = max_buffered

    def next(self, replica: int) -> SimulatedRequest | None:
        while self._waiting and len(self._buckets) < self._max_buffered:
            request = self._waiting.popleft()
            num_tokens = request.prompt_tokens + request.output_tokens
            self._buckets.add(BucketPrompt(request, request.chain, num_tokens))
        found = self._buckets.next(replica)
        return None if found is None else found.item


ONLINE: dict[str, Callable[[SimulatedReplicas, StepCosts], OnlineRouter]] = {
    "relay": EarliestFinish,
    "round-robin": RoundRobin,
    "fewest-requests": FewestRequests,
    "hash": FirstBlockHash,
}
"""For requests that arrive one by one."""


def offline(rule: str, replicas: SimulatedReplicas, costs: StepCosts) -> OfflineSource:
    """For requests that are all there."""
    if rule == "relay":
        return Buckets(replicas)
    if rule == "fewest-requests":
        return NextInLine(replicas)
    return Shares(
        replicas,
        RoundRobin(replicas, costs) if rule == "round-robin" else FirstBlockHash(replicas, costs),
    )
