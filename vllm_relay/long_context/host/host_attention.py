# SPDX-License-Identifier: Apache-2.0
"""Attention of a step's queries over tokens in host memory."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from vllm_relay import _C
from vllm_relay.attention_backends.cpu.kernels import DTYPE_CODES
from vllm_relay.attention_backends.cpu.unpacked import (
    TokenRun,
    UnpackedRequest,
    unpacked_attention,
)
from vllm_relay.long_context.host.host_sequence import HostLayer
from vllm_relay.long_context.window import Residency
from vllm_relay.sparse.contexts.context_store import Link, StoredContext
from vllm_relay.sparse.contexts.retrieval import ContextPart, SessionStats, queries_of_heads
from vllm_relay.sparse.index.elements import to_tensor
from vllm_relay.sparse.index.query_types import Dipr, QueryType
from vllm_relay.sparse.index.sparse_layer import MEAN_TOKENS, SparseLayer
from vllm_relay.sparse.plan.options import DBOptions

RECENT_TOKENS = 64
"""At least so many tokens at the end of a stored context are read by every query."""

_MAX_KNOWN_SEARCHES = 64
"""Of the indexes of a layer; then all are made again. Each request that goes on behind a context
needs a few, until its window has left it."""


@dataclass
class Retrieval:
    """What a decoded token reads of the tokens in host memory.

    Attributes:
        query: what is asked of indexes that are built while a request runs; None: all is read.
        options: how stored contexts are asked, whose heads may have plans.
        scale: of the scores in the softmax.
    """

    query: Dipr | None
    options: DBOptions
    scale: float
    _searches: WeakKeyDictionary[SparseLayer, dict[tuple[int, int, int], Any]] = field(
        default_factory=WeakKeyDictionary
    )

    def search(self, layer: SparseLayer, begin: int, end: int, part: ContextPart | None) -> Any:
        """What the C++ side is told of a search of the keys `begin` to `end` of a layer.

        Args:
            part: of a stored context that is read; None: the layer is of a running request.
        """
        known = self._searches.setdefault(layer, {})
        at = begin, end, 0 if part is None else part.end
        if at not in known:
            asked: Sequence[QueryType | None] = [self.query] * len(layer.indexes)
            if part is not None:
                asked = queries_of_heads(part, scale=self.scale, options=self.options)
            if len(known) == _MAX_KNOWN_SEARCHES:
                known.clear()
            known[at] = layer.native_search(asked, begin, end)
        return known[at]


@dataclass
class HostPart:
    """The host's part of a request in one layer: a stored context, and what was computed since.

    Attributes:
        own: of the tokens behind the context.
        context: None if there is none; then `own` begins with the first token.
        layer: number of the layer in the context.
        num_tokens: of the request, those of the step included.
    """

    own: HostLayer
    context: StoredContext | None
    layer: int
    residency: Residency
    num_tokens: int

    @property
    def context_end(self) -> int:
        """Tokens of the context that are read here: those behind are on the device."""
        return min(self.own.begin, self.residency.window_begin)

    def context_rows(self, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the context, [kv_heads, tokens, size]: a copy."""
        runs = self.context_runs(begin, end)
        return (
            torch.cat([torch.stack([*run.keys]) for run in runs], 1),
            torch.cat([torch.stack([*run.values]) for run in runs], 1),
        )

    def context_runs(self, begin: int, end: int) -> list[TokenRun]:
        """These tokens of the context, where they lie: a run for each link that has any."""
        runs = []
        for link in self.context.links(end) if self.context is not None else ():
            first = max(begin, link.begin)
            if first >= link.end:
                continue
            rows = [
                link.context.own_rows(self.layer, head, first - link.begin, link.end - link.begin)
                for head in range(link.context.shape.num_kv_heads)
            ]
            keys, values = zip(*rows, strict=True)
            runs.append(
                TokenRun(first, link.end, [*map(to_tensor, keys)], [*map(to_tensor, values)])
            )
        return runs

    def own_run(self, begin: int, end: int) -> TokenRun:
        """These of the tokens behind the context."""
        keys, values = self.own.rows(begin, max(begin, end))
        return TokenRun(begin, end, keys.unbind(), values.unbind())

    def native(
        self, token: int, retrieval: Retrieval, gaps: Sequence[tuple[Any, list[tuple[int, int]]]]
    ) -> Any:
        """What the C++ side is told of the request.

        Args:
            token: its row in the tensors.
            gaps: of the context, rows and ranges of them that no index has.
        """
        (begin, end), own = self.residency, self.own
        segments = own.segments_up_to(end)
        indexed = segments[-1].end if segments else own.index_begin
        attended = [(indexed, end), (max(begin, own.begin), min(own.sink_end, end))]
        attended += [(each.begin, each.end) for each in segments if each.layer is None]
        # the host has a copy of what is on the device
        others = [(max(indexed, end, own.begin), self.num_tokens)]
        if self.context is None:
            others.append((0, begin))
        first = own.begin
        return _C.host.HostRequest(
            token,
            own.native,
            [
                (
                    own.native,
                    [(begin - first, end - first) for begin, end in attended if begin < end],
                ),
                *gaps,
            ],
            [(begin - first, end - first) for begin, end in others if begin < end],
            [
                retrieval.search(each.layer, 0, each.end - each.begin, None)
                for each in segments
                if each.layer is not None
            ],
        )

    def searched(self, link: Link) -> ContextPart:
        """What is searched of a link: every query reads the sinks and the last tokens."""
        num_tokens, recent = link.end - link.begin, self.context_end - RECENT_TOKENS
        begin = min(max(0, self.own.sink_end - link.begin), num_tokens)
        end = min(num_tokens, recent - link.begin)
        return ContextPart(link.context, self.layer, begin, max(begin, end))


def attend_everything(
    parts: Sequence[HostPart],
    queries: Sequence[slice],
    query: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor | None,
    scale: float,
    *,
    with_device: bool = False,
    kernel: str = "auto",
) -> None:
    """Exact attention of requests over all of their tokens in host memory.

    Args:
        parts: all of the same context, which is read once for them, or none of one.
        queries: of each request, its rows in the tensors.
        query: [tokens, heads, head_size].
        output: as `query`, or float32; written where nothing is raised.
        lse: float32 [tokens, heads], or None.
        with_device: the tokens on the device are read too, from the host's copy, and a query token
            sees those before it: what RELAY computes where all of them are on the device, to the
            last bit. Otherwise every query token sees all that is read.
        kernel: as for `unpacked_attention`.

    Raises:
        IndexDamagedError: a page of the context is not what was written; nothing was written.
    """
    ranges = [(0, part.num_tokens) if with_device else part.residency for part in parts]
    context = parts[0].context_runs(
        min(begin for begin, _ in ranges),
        max(min(part.own.begin, end) for part, (_, end) in zip(parts, ranges, strict=True)),
    )
    requests = []
    for part, at, (begin, end) in zip(parts, queries, ranges, strict=True):
        last = min(part.own.begin, end)
        runs = [replace(run, end=min(run.end, last)) for run in context if begin < last]
        runs.append(part.own_run(max(begin, part.own.begin), end))
        requests.append(
            UnpackedRequest(
                at.start, at.stop - at.start, begin, end,
                [run for run in runs if run.begin < run.end], is_causal=with_device,
            )
        )  # fmt: skip
    unpacked_attention(
        query, requests, output, lse,
        scale=scale, num_kv_heads=parts[0].own.keys.shape[0], kernel=kernel,
    )  # fmt: skip


def attend_retrieved(
    parts: Sequence[HostPart],
    tokens: Sequence[int],
    query: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    retrieval: Retrieval,
    stats: SessionStats,
) -> None:
    """Adds to the attention of one token of each request what its heads need of the host's tokens.

    Those that read the same tokens of the context search it together.

    Args:
        parts: all of the same context, or none of one.
        tokens: of each request, its row in the tensors.
        query: [tokens, heads, head_size].
        output, lse: attention over the tokens on the device, as `query` and float32
            [tokens, heads]; -inf where there are none. Written if nothing is raised.

    Raises:
        IndexDamagedError: a page of the context is not what was written.
    """
    num_heads, num_kv_heads = query.shape[1], len(parts[0].own.keys)
    context = parts[0].context
    with contextlib.nullcontext() if context is None else context.reading():
        totals = _C.host.attend(
            _groups(parts, tokens, retrieval), DTYPE_CODES[query.dtype], num_kv_heads,
            num_heads // num_kv_heads, query.shape[2],
            query.data_ptr(), query.stride(0), query.stride(1),
            output.data_ptr(), output.stride(0), output.stride(1),
            lse.data_ptr(), retrieval.scale, torch.get_num_threads(),
        )  # fmt: skip
    stats.add(*totals)


def _groups(parts: Sequence[HostPart], tokens: Sequence[int], retrieval: Retrieval) -> list[Any]:
    """What the C++ side is told of the requests."""
    sharing: dict[int, list[int]] = {}
    for number, part in enumerate(parts):
        # where none has a context, each is alone
        sharing.setdefault(number if part.context is None else part.context_end, []).append(number)
    groups = []
    for numbers in sharing.values():
        links, gaps = _native_links(parts[numbers[0]], retrieval)
        requests = [parts[number].native(tokens[number], retrieval, gaps) for number in numbers]
        groups.append(_C.host.HostGroup(requests, links))
    return groups


_Ranges = list[tuple[int, int]]


def _native_links(
    part: HostPart, retrieval: Retrieval
) -> tuple[list[tuple[Any, _Ranges]], list[tuple[Any, _Ranges]]]:
    """Of the context: searches, and what is read of their keys besides; and the rows that no index
    has."""
    links: list[tuple[Any, _Ranges]] = []
    gaps: list[tuple[Any, _Ranges]] = []
    for link in () if part.context is None else part.context.links(part.context_end):
        searched, num_tokens = part.searched(link), link.end - link.begin
        at, unindexed = 0, []
        for first, layer in link.context.pieces(part.layer):
            last = min(first + layer.num_keys, num_tokens)
            if first >= last:
                break
            begin = min(
                -(-max(0, searched.begin - first) // MEAN_TOKENS) * MEAN_TOKENS, last - first
            )
            end = max(begin, min(searched.end, last) - first)
            if end < layer.num_keys:
                end = max(begin, end // MEAN_TOKENS * MEAN_TOKENS)
            search = retrieval.search(layer, begin, end, searched)
            links.append((search, [(0, begin), (end, last - first)]))
            unindexed.append((at, first))
            at = last
        unindexed.append((at, num_tokens))
        if ranges := [each for each in unindexed if each[0] < each[1]]:
            gaps.append((link.context.native_rows(part.layer), ranges))
    return links, gaps
