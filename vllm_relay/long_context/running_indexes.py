# SPDX-License-Identifier: Apache-2.0
"""Better indexes for requests that are still running, built beside their steps.

A request is searched by a scan at first. A builder indexes its largest segment, layer by layer; the
request takes each layer at the begin of a step, and drops the scan's codes of that segment then.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vllm_relay.long_context.host_sequence import (
    HostLayer,
    HostSequence,
    PendingSegment,
    Segment,
    as_elements_of,
)
from vllm_relay.long_context.index_builders import process_ends
from vllm_relay.long_context.index_payoff import IndexPayoff, SavedTime
from vllm_relay.sparse.attention import SparseLayer
from vllm_relay.sparse.elements import Elements
from vllm_relay.sparse.face import CompiledIndex
from vllm_relay.sparse.index_choice import build_index
from vllm_relay.sparse.options import DBOptions
from vllm_relay.sparse.query_types import Dipr, QueryType
from vllm_relay.sparse.search_cost import SearchCost

logger = logging.getLogger("vllm.relay")


@dataclass
class LayerBuild:
    """What a builder is given of a layer: it reads nothing that steps change.

    Attributes:
        keys, values: of each kv head, where they lie.
        train_queries: [kv_heads, m, head_size] parts, in token order.
        last_queries: [kv_heads, tokens, group, head_size].
    """

    layer: HostLayer
    pending: PendingSegment
    query: Dipr
    keys: list[Elements]
    values: list[Elements]
    train_queries: list[Any]
    last_queries: Any

    @property
    def is_stale(self) -> bool:
        """Its tokens were written again."""
        return self.layer.pending is not self.pending

    def train_queries_of(self, head: int) -> Elements:
        """Copied by numpy: torch would use the cores of the thread that it is called from."""
        parts = [as_elements_of(part[head]) for part in self.train_queries]
        return Elements(np.concatenate([part.data for part in parts]), parts[0].dtype)

    def last_queries_of(self, head: int) -> np.ndarray:
        """float32 [tokens, group, head_size]"""
        return np.ascontiguousarray(as_elements_of(self.last_queries[head]).to_float32())


@dataclass
class RequestBuild:
    """The build of one request.

    Attributes:
        layers: that are left.
        kinds: that plans choose from.
        tokens_left: of the request, kept up to date: a layer whose turn comes too late is left out.
        ready: layers that the request has not taken yet.
    """

    layers: deque[LayerBuild]
    kinds: tuple[str, ...]
    tokens_left: int
    ready: deque[tuple[LayerBuild, Segment]] = field(default_factory=deque)
    is_cancelled: bool = False
    done: Future[None] | None = None

    def cancel(self) -> None:
        """Lets go of the request's memory; what is being built is finished, and dropped."""
        self.is_cancelled = True
        if self.done is not None:
            self.done.cancel()
        self.layers.clear()
        self.ready.clear()

    def take_ready(self) -> None:
        while self.ready:
            build, segment = self.ready.popleft()
            build.layer.take(segment, build.pending)


@dataclass
class _Followed:
    sequence: HostSequence
    payoff: IndexPayoff
    saved: SavedTime
    build: RequestBuild | None = None


class RunningIndexes:
    """Decides for which running requests better indexes are built, and hands them over.

    Args:
        builders: called when there is something to build.
    """

    def __init__(self, costs: SearchCost, builders: Callable[[], ThreadPoolExecutor]) -> None:
        self._costs, self._builders = costs, builders
        self._followed: dict[str, _Followed] = {}
        self._payoff: IndexPayoff | None = None  # all layers have the same heads

    @property
    def num_queued(self) -> int:
        """Requests whose indexes are being built, or wait for it."""
        builds = [each.build for each in self._followed.values()]
        return sum(each is not None and not _is_done(each) for each in builds)

    def follow(self, request_id: str, sequence: HostSequence, tokens_left: int) -> bool:
        """Before every step in which a request generates a token.

        Args:
            tokens_left: that it generates at most, that of the step included.

        Returns:
            whether a build was begun: no more queries are needed.
        """
        followed = self._followed.get(request_id)
        if followed is not None and followed.sequence is not sequence:
            self.discard(request_id)
            followed = None
        if followed is None:
            followed = self._begin(sequence)
            if followed is None:
                return False
            self._followed[request_id] = followed
        if followed.build is not None:
            followed.build.tokens_left = tokens_left
            followed.build.take_ready()
            return True
        first = next(iter(sequence.layers.values())).large_flat_segment
        if first is None:
            return False
        num_keys = first.end - first.begin
        followed.saved.count_token(num_keys)
        kinds = followed.saved.kinds_that_pay(num_keys, tokens_left)
        if kinds:
            followed.build = self._start(followed, kinds, tokens_left)
        return followed.build is not None

    def discard(self, request_id: str) -> None:
        """The request has ended, or begins again."""
        followed = self._followed.pop(request_id, None)
        if followed is not None and followed.build is not None:
            followed.build.cancel()

    def close(self) -> None:
        for request_id in list(self._followed):
            self.discard(request_id)

    def _begin(self, sequence: HostSequence) -> _Followed | None:
        """None as long as nothing is known of its queries."""
        layer = next(iter(sequence.layers.values()), None)
        if layer is None or layer.query is None:
            return None
        if self._payoff is None:
            head_size = layer.keys.shape[2]
            self._payoff = IndexPayoff(
                self._costs,
                group=layer.train_queries.group,
                head_size=head_size,
                key_bytes=head_size * layer.keys.element_size(),
            )
        return _Followed(sequence, self._payoff, SavedTime(self._payoff))

    def _start(self, followed: _Followed, kinds: tuple[str, ...], tokens_left: int) -> RequestBuild:
        layers = [_layer_build(each) for each in followed.sequence.layers.values()]
        build = RequestBuild(deque(each for each in layers if each is not None), kinds, tokens_left)
        build.done = self._builders().submit(self._run, build, followed.payoff)
        return build

    def _run(self, build: RequestBuild, payoff: IndexPayoff) -> None:
        while build.layers and not build.is_cancelled:
            try:
                layer = build.layers.popleft()
            except IndexError:  # cancelled meanwhile
                return
            try:
                segment = self._index(layer, build, payoff)
            except Exception:
                if not layer.is_stale:
                    logger.exception("a layer of a running request keeps its flat indexes")
                continue
            if segment is not None and not build.is_cancelled:
                build.ready.append((layer, segment))

    def _index(self, layer: LayerBuild, build: RequestBuild, payoff: IndexPayoff) -> Segment | None:
        """None: flat indexes are best, or it is too late."""
        num_keys = layer.pending.end - layer.pending.begin
        kinds = [
            kind
            for kind in build.kinds
            if payoff.break_even_tokens(kind, num_keys) <= build.tokens_left
        ]
        options = DBOptions(query=replace(layer.query, scale=None), threads=1)
        indexes: list[CompiledIndex] = []
        queries: list[QueryType | None] = []
        for head, (keys, values) in enumerate(zip(layer.keys, layer.values, strict=True)):
            if not kinds or build.is_cancelled or layer.is_stale or process_ends():
                return None
            train, last = layer.train_queries_of(head), layer.last_queries_of(head)
            index, plan = build_index(
                0, keys, values, train, last.shape[1], options, self._costs, last,
                ("full", "flat", *kinds),
            )  # fmt: skip
            planned = None if plan is None else plan.query_for(num_keys)
            assert isinstance(index, CompiledIndex)
            indexes.append(index)
            queries.append(replace(layer.query, width=None if planned is None else planned.width))
        if all(index.kind == "flat" for index in indexes):
            return None
        sparse_layer = SparseLayer(indexes, layer.values)
        return Segment(layer.pending.begin, layer.pending.end, sparse_layer, queries)


def _layer_build(layer: HostLayer) -> LayerBuild | None:
    """None where there is nothing to build, or nothing to plan by."""
    segment, last = layer.large_flat_segment, layer.train_queries.last()
    if segment is None or last is None or layer.query is None:
        return None
    train_queries = layer.train_queries.parts_before(segment.end)
    if not train_queries or last.shape[1] >= segment.end - segment.begin:
        return None
    layer.pending = PendingSegment(segment.begin, segment.end)
    keys, values = layer.rows(segment.begin, segment.end)
    return LayerBuild(
        layer,
        layer.pending,
        layer.query,
        [as_elements_of(head) for head in keys],
        [as_elements_of(head) for head in values],
        train_queries,
        last,
    )


def _is_done(build: RequestBuild) -> bool:
    return build.done is not None and build.done.done()
