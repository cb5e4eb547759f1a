# SPDX-License-Identifier: Apache-2.0
"""Ray Serve's choice of a replica, made by a `Gateway`.

Ray Serve sends this module by value: what is defined here is defined anew in every process that
routes, and is equal to nothing that others import.
"""

from __future__ import annotations

from typing import Any, TypeVar

from ray.serve.metrics import Counter, Gauge
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from vllm_relay.cluster.gateway import Gateway, RoutedRequest
from vllm_relay.cluster.ray.asked import CACHE_TOKENS, Asked, Visit

T = TypeVar("T")


class PrefixRouter(RequestRouter):
    """Sends each call that has an `Asked` where it is expected to be finished first, those with a
    `Visit` where that says; others to the replica with the fewest."""

    # of a replica that is asked whether it is there
    queue_len_response_deadline_s = 10.0
    max_queue_len_response_deadline_s = 10.0

    def initialize_state(self, **kwargs: Any) -> None:
        """See `RequestRouter`."""
        self._gateway: Gateway[ReplicaID] = Gateway(**kwargs)
        tags = ("to_replica",)
        self._load = Gauge("relay_load_tokens", "Tokens that a replica has to compute", tags)
        self._prompt = Counter("relay_routed_prompt_tokens", "Tokens of prompts, about", tags)
        self._cached = Counter(
            "relay_expected_cached_tokens", "Of these, expected in the replica's cache", tags
        )

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """See `RequestRouter`."""
        super().update_replicas(replicas)
        found = {each.replica_id: each.replica_metadata for each in replicas}
        for known in self._gateway.replicas:
            if known not in found:
                self._gateway.lost(known)
        for replica_id, metadata in found.items():
            self._gateway.add(replica_id, metadata.get(CACHE_TOKENS))

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """See `RequestRouter`."""
        super().on_replica_actor_died(replica_id)
        self._gateway.lost(replica_id)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """See `RequestRouter`."""
        if pending_request is not None:
            # who cannot be reached is asked again after a pause, or another one at once
            pending_request.routing_context.should_backoff = True
        visit = _given(pending_request, Visit)
        if visit is not None:
            by_id = {each.replica_id.unique_id: each for each in candidate_replicas}
            return [[by_id[each] for each in visit.choose(by_id)]]
        candidates = {each.replica_id: each for each in candidate_replicas}
        asked = _given(pending_request, Asked)
        if asked is None or not candidates.keys() & set(self._gateway.replicas):
            return [candidate_replicas]
        routed = asked.route(self._gateway, set(candidates))
        self._count(routed, asked)
        return [[candidates[routed.replica]]]

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """See `RequestRouter`."""
        self._load.set(self._gateway.load_tokens(replica_id), _tags(replica_id))

    def _count(self, routed: RoutedRequest[ReplicaID], asked: Asked) -> None:
        tags = _tags(routed.replica)
        self._load.set(self._gateway.load_tokens(routed.replica), tags)
        if asked.num_routed > 1:  # a request is counted once, where it was sent first
            return
        for counter, tokens in (
            (self._prompt, asked.prompt.prompt_tokens),
            (self._cached, routed.num_cached_tokens),
        ):
            if tokens:
                counter.inc(tokens, tags)


def _tags(replica_id: ReplicaID) -> dict[str, str]:
    return {"to_replica": replica_id.unique_id}


def _given(pending_request: PendingRequest | None, kind: type[T]) -> T | None:
    """The argument of this kind."""
    if pending_request is None:
        return None
    given = [*pending_request.args, *pending_request.kwargs.values()]
    return next((each for each in given if isinstance(each, kind)), None)
