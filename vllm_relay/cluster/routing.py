# SPDX-License-Identifier: Apache-2.0
"""Which replica gets a request: the one that is expected to finish it first.

A replica's load is the work that it has not done yet, and falls as answers come. A
request costs a replica what of its prompt is not in its cache, and its answer. So a prefix stays
where it is known until waiting there costs more than computing it again, and then has two homes.
The aim of dynamic prefix bucketing (Wang, 2025), whose router chooses among the replicas with the
fewest prompts the one that saw a prefix last, with costs in place of its thresholds.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from math import inf

from vllm_relay.cluster.replica_index import Block, ReplicaIndex, numbers_of


@dataclass(frozen=True)
class ServingCosts:
    """What requests take of a replica, in seconds of its own or in any other unit, such as tokens.

    Attributes:
        prompt_token: a prompt's token that is not in the cache.
        output_token: a token of an answer, its share of a step.
    """

    prompt_token: float
    output_token: float

    def __post_init__(self) -> None:
        for name in ("prompt_token", "output_token"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)} given, expected 0 or more")

    def of_prompt(self, tokens: int) -> float:
        return self.prompt_token * tokens

    def of_output(self, tokens: int) -> float:
        return self.output_token * tokens


@dataclass(frozen=True)
class Routed:
    """Where a request goes.

    Attributes:
        replica: its number.
        num_cached_tokens: of the prompt, expected in the replica's cache.
    """

    replica: int
    num_cached_tokens: int


@dataclass
class _Running:
    replica: int
    prompt_cost: float
    output_cost: float


@dataclass
class Router:
    """Requests go where they are expected to be finished first.

    Attributes:
        index: what the replicas' caches hold.
        costs: of requests.
        block_size_tokens: of a KV block.
        locality: what work done once more counts beside work waited for: more than one, as it
            takes the replica's time from all and a place in its cache.
    """

    index: ReplicaIndex
    costs: ServingCosts
    block_size_tokens: int
    num_replicas: int
    locality: float = 2.0
    _loads: list[float] = field(init=False)
    _num_running: list[int] = field(init=False)
    _num_routed: int = field(init=False)
    _last_routed: list[int] = field(init=False)
    _running: dict[Hashable, _Running] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._loads = [0.0] * self.num_replicas
        self._num_running = [0] * self.num_replicas
        self._num_routed = 0
        self._last_routed = [0] * self.num_replicas
        """Of each replica, its last request's number: where all is equal they take turns."""

    @property
    def loads(self) -> Sequence[float]:
        """Work that each replica has yet to do, in the unit of the costs."""
        return self._loads

    def route(
        self,
        request: Hashable,
        chain: Sequence[Block],
        prompt_tokens: int,
        output_tokens: int,
        among: Collection[int] | None = None,
    ) -> Routed:
        """Choose a replica for a request, which is on its way there from now on.

        Args:
            request: by which it is known until it has ended.
            chain: the full blocks of its prompt.
            output_tokens: that its answer is expected to have.
            among: replicas that can be had; None for all.

        Raises:
            ValueError: no replica can be had, or the request is known already.
        """
        if request in self._running:
            raise ValueError(f"request {request!r} was routed before and has not ended")
        if among is not None and not among:
            raise ValueError(f"no replica can be had for request {request!r}: wait for one")
        size = self.block_size_tokens
        # the last token is always computed
        most = max(prompt_tokens - 1, 0) // size
        replica, depth = self._best(self.index.held.ends(chain[:most]), among)
        costs = self.costs
        cached = depth * size
        work = _Running(
            replica, costs.of_prompt(prompt_tokens - cached), costs.of_output(output_tokens)
        )
        self._running[request] = work
        self._loads[replica] += work.prompt_cost + work.output_cost
        self._num_running[replica] += 1
        self._num_routed += 1
        self._last_routed[replica] = self._num_routed
        self.index.sent(replica, chain, depth)
        return Routed(replica, cached)

    def _best(
        self, ends: Sequence[tuple[int, int]], among: Collection[int] | None
    ) -> tuple[int, int]:
        """Where a request is expected to be finished first, and how many of its blocks are there.

        Args:
            ends: see `HeldBlocks.ends`.
        """
        loads, num_running = self._loads, self._num_running
        block_cost = self.costs.prompt_token * self.block_size_tokens * self.locality
        least = self._least_loaded(among)
        allowed = -1 if among is None else sum(1 << each for each in among)
        best, found = (inf, 0, 0, 0), (least, 0)
        for depth, bits in reversed(ends):
            # who holds no more than the one with the least load cannot be better
            is_last = bits >> least & 1
            for each in (least,) if is_last else numbers_of(bits & allowed):
                rank = (
                    loads[each] - block_cost * depth,
                    -depth,
                    num_running[each],
                    self._last_routed[each],
                )
                if rank < best:
                    best, found = rank, (each, depth)
            if is_last:
                break
        return found

    def _least_loaded(self, among: Collection[int] | None) -> int:
        """Of equal loads, the one with the fewest requests."""
        loads, candidates = self._loads, among
        if candidates is None:
            least_load = min(loads)
            if loads.count(least_load) == 1:
                return loads.index(least_load)
            candidates = range(self.num_replicas)
        return min(
            candidates,
            key=lambda each: (loads[each], self._num_running[each], self._last_routed[each]),
        )

    def answered(self, request: Hashable) -> None:
        """The first token of a request's answer came: its prompt is computed."""
        work = self._running.get(request)
        if work is not None:
            self._loads[work.replica] -= work.prompt_cost
            work.prompt_cost = 0.0

    def ended(self, request: Hashable) -> None:
        """A request has its answer, or none will come."""
        work = self._running.pop(request, None)
        if work is None:
            return
        replica = work.replica
        self._num_running[replica] -= 1
        self._loads[replica] -= work.prompt_cost + work.output_cost
        if not self._num_running[replica]:
            self._loads[replica] = 0.0  # without what rounding left

    def lost(self, replica: int) -> list[Hashable]:
        """A replica is gone with its cache; returns the requests that it had."""
        requests = [each for each, work in self._running.items() if work.replica == replica]
        for request in requests:
            self.ended(request)
        self.index.clear(replica)
        return requests
