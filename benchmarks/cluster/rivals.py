# SPDX-License-Identifier: Apache-2.0
"""Rules by which others choose a replica, and ours behind the same interface.

Each is what its documentation says: "round robin"; "fewest requests" (Ray Serve's and vLLM's
data-parallel balancer); "consistent hash" of the first block (vllm-router, NGINX); "prefix
affinity": the longest prefix that a replica was sent, unless its requests are 32 more than the
fewest (Ray's PrefixCacheAffinityRouter, SGLang's cache-aware rule); "Daft": of those replicas with
at most 256 prompts more than the fewest, the one that saw the prefix last, of eight remembered for
each replica.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from functools import partial

from vllm_relay.cluster.replica_index import PredictedCaches, numbers_of
from vllm_relay.cluster.routing import Router, ServingCosts
from vllm_relay.cluster.rules import (
    MAX_BUFFERED,
    Buckets,
    EarliestFinish,
    FewestRequests,
    FirstBlockHash,
    NextInLine,
    RoundRobin,
)
from vllm_relay.cluster.simulate import SimulatedReplicas, SimulatedRequest
from vllm_relay.prefix_cache.predict.step_costs import StepCosts


class PrefixAffinity(FewestRequests):
    slack = 32

    def __init__(self, replicas: SimulatedReplicas, costs: StepCosts) -> None:
        super().__init__(replicas, costs)
        self.sent = PredictedCaches([1 << 20] * self.num_replicas)

    def pick(self, request: SimulatedRequest) -> int:
        _, longest = self.sent.held.ends(request.chain)[-1]
        replica = min(numbers_of(longest), key=self.num_running.__getitem__)
        if self.num_running[replica] > min(self.num_running) + self.slack:
            replica = super().pick(request)
        self.sent.sent(replica, request.chain)
        return replica


ONLINE = {
    "round robin": RoundRobin,
    "fewest requests": FewestRequests,
    "consistent hash": FirstBlockHash,
    "prefix affinity": PrefixAffinity,
    "relay": EarliestFinish,
}


class Weighed(EarliestFinish):
    """Relay's, where a token of an answer counts `output` times what one of a prompt does, and what
    is computed once more `locality` times."""

    def __init__(
        self,
        replicas: SimulatedReplicas,
        costs: StepCosts,
        output: float = 1.0,
        locality: float = Router.locality,
    ) -> None:
        super().__init__(replicas, costs)
        self._router.costs = ServingCosts(costs.token_s, output * costs.token_s)
        self._router.locality = locality


WEIGHED = {
    "relay, answers by half": partial(Weighed, output=0.5),
    "relay, answers twice": partial(Weighed, output=2.0),
    "relay, locality 1": partial(Weighed, locality=1.0),
    "relay, locality 4": partial(Weighed, locality=4.0),
}
"""How much it matters that weights are wrong."""


class Sorted:
    """All requests are sorted first, and each replica gets a part as long as others'."""

    def __init__(self, replicas: SimulatedReplicas) -> None:
        requests = sorted(replicas.requests, key=lambda each: each.chain)
        count, size = len(replicas), len(requests)
        self._parts = [
            deque(requests[size * part // count : size * (part + 1) // count])
            for part in range(count)
        ]

    def next(self, replica: int) -> SimulatedRequest | None:
        part = self._parts[replica]
        return part.popleft() if part else None


class LongestFirst(Sorted):
    """Whoever has room takes the one with the longest answer, which nobody knows beforehand: how
    even the work of replicas can be."""

    def __init__(self, replicas: SimulatedReplicas) -> None:
        waiting = deque(sorted(replicas.requests, key=lambda each: -each.output_tokens))
        self._parts = [waiting] * len(replicas)


class DaftBuckets(Sorted):
    """Buckets of a sorted buffer, the largest first, go where the prefix was seen last, of the
    replicas with few prompts. They are sent as soon as they leave the buffer."""

    match, slack, remembered = 0.33, 256, 8

    def __init__(
        self, replicas: SimulatedReplicas, max_buffered: int = MAX_BUFFERED, least: int = 16
    ) -> None:
        count = len(replicas)
        self._parts = [deque() for _ in range(count)]
        self._loads = [0] * count
        self._seen: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(count)]
        buffer: list[SimulatedRequest] = []
        for request in replicas.requests:
            buffer.append(request)
            if len(buffer) > max_buffered:
                buffer = self._send(buffer, least)
        while buffer:
            buffer = self._send(buffer, 1)

    def _send(self, buffer: list[SimulatedRequest], least: int) -> list[SimulatedRequest]:
        """Send the largest bucket; of smaller ones than `least` none but to make room."""
        buckets = self._buckets(buffer)
        buckets.sort(key=len, reverse=True)
        sent = [bucket for bucket in buckets[1:] if len(bucket) >= least][: len(buckets) // 8]
        for bucket in (buckets[0], *sent):
            self._route(bucket)
        gone = {each.number for bucket in (buckets[0], *sent) for each in bucket}
        return [each for each in buffer if each.number not in gone]

    def _buckets(self, buffer: list[SimulatedRequest]) -> list[list[SimulatedRequest]]:
        buckets: list[list[SimulatedRequest]] = []
        for request in sorted(buffer, key=lambda each: each.chain):
            if buckets:
                before = buckets[-1][-1].chain
                longest = max(len(before), len(request.chain), 1)
                if _common(before, request.chain) >= self.match * longest:
                    buckets[-1].append(request)
                    continue
            buckets.append([request])
        return buckets

    def _route(self, bucket: Sequence[SimulatedRequest]) -> None:
        fewest = min(self._loads)
        near = [each for each, load in enumerate(self._loads) if load <= fewest + self.slack]
        prefix = bucket[0].chain[0] if bucket[0].chain else 0

        def seen_last(replica: int) -> int:
            seen = list(self._seen[replica])
            return seen.index(prefix) + 1 if prefix in seen else 0

        replica = max(near, key=seen_last)
        seen = self._seen[replica]
        seen.pop(prefix, None)
        seen[prefix] = None
        if len(seen) > self.remembered:
            seen.popitem(last=False)
        self._loads[replica] += len(bucket)
        self._parts[replica].extend(bucket)


STREAMED = {
    "next to whoever has room": NextInLine,
    "sorted first": Sorted,
    "Daft": DaftBuckets,
    "relay": Buckets,
}

KNOWN_LENGTHS = {"longest answers first": LongestFirst}
"""Beside these, where answers differ."""


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    depth = 0
    while depth < min(len(left), len(right)) and left[depth] == right[depth]:
        depth += 1
    return depth
