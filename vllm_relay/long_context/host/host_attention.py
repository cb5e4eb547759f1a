# SPDX-License-Identifier: Apache-2.0
"""Attention of a step's queries over tokens in host memory."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from vllm_relay import _C
from vllm_relay.attention_backends.cpu import DTYPE_CODES
from vllm_relay.long_context.host.host_sequence import HostLayer
from vllm_relay.long_context.window import Residency
from vllm_relay.sparse.contexts.context_store import Link, StoredContext
from vllm_relay.sparse.contexts.partial_attention import attention_state, merge
from vllm_relay.sparse.contexts.retrieval import ContextPart, SessionStats, queries_of_heads
from vllm_relay.sparse.contexts.tensors import to_tensor
from vllm_relay.sparse.index.query_types import Dipr
from vllm_relay.sparse.index.value_means import MEAN_TOKENS
from vllm_relay.sparse.plan.options import DBOptions

RECENT_TOKENS = 64
"""At least so many tokens at the end of a stored context are read by every query."""

State = tuple[torch.Tensor, torch.Tensor]
"""Output float32 [kv_heads, rows, size] and log-sum-exp float32 [kv_heads, rows]."""


_MAX_KNOWN_SEARCHES = 64
"""Of a context in one layer; then all are made again. Each request that goes on behind it needs a
few, until its window has left it."""


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
    _searches: WeakKeyDictionary[StoredContext, dict[tuple[int, int, int], Any]] = field(
        default_factory=WeakKeyDictionary
    )

    def native(self, part: ContextPart) -> Any:
        """What the C++ side is told of a search of a stored context."""
        known = self._searches.setdefault(part.context, {})
        at = part.layer, part.begin, part.end
        if at not in known:
            layer = part.context.layer(part.layer)
            assert layer is not None, "contexts of an engine have relay's own indexes"
            asked = queries_of_heads(part, scale=self.scale, options=self.options)
            if len(known) == _MAX_KNOWN_SEARCHES:
                known.clear()
            known[at] = layer.native_search(asked, part.begin, part.end)
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
        assert self.context is not None
        heads = range(self.context.shape.num_kv_heads)
        rows = [self.context.rows(self.layer, head, begin, end) for head in heads]
        keys, values = zip(*rows, strict=True)
        return (
            torch.stack([to_tensor(each) for each in keys]),
            torch.stack([to_tensor(each) for each in values]),
        )

    def all_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all tokens, those on the device included: a copy with a context."""
        own = self.own.rows(self.own.begin, self.num_tokens)
        if self.context is None:
            return own
        context = self.context_rows(0, self.own.begin)
        return torch.cat([context[0], own[0]], 1), torch.cat([context[1], own[1]], 1)

    def native(self, token: int, retrieval: Retrieval) -> Any:
        """What the C++ side is told of the request; `token` is its row in the tensors."""
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
            [(begin - first, end - first) for begin, end in attended if begin < end],
            [(begin - first, end - first) for begin, end in others if begin < end],
            [each.native(retrieval.query) for each in segments if each.layer is not None],
        )

    def searched(self, link: Link) -> ContextPart:
        """What is searched of a link: every query reads the sinks and the last tokens."""
        num_tokens, recent = link.end - link.begin, self.context_end - RECENT_TOKENS
        # whole runs of tokens that have one mean value
        begin = _round_up(max(0, self.own.sink_end - link.begin))
        end = min(num_tokens, recent - link.begin)
        if end < link.context.num_tokens - link.begin:
            end = end // MEAN_TOKENS * MEAN_TOKENS
        begin = min(begin, num_tokens)
        return ContextPart(link.context, self.layer, begin, max(begin, end))


def attend_everything(part: HostPart, query: torch.Tensor, scale: float) -> State:
    """Attention over all tokens that are not on the device.

    Args:
        query: [tokens, heads, head_size], of one request.

    Returns:
        output float32 [tokens, heads, head_size] and log-sum-exp float32 [tokens, heads].
    """
    num_queries = query.shape[0]
    rows = _by_kv_head(query, part.own.keys.shape[0])
    begin, end = part.residency
    own_begin = max(begin, part.own.begin)
    state = attention_state(rows, *part.own.rows(own_begin, max(own_begin, end)), scale)
    if part.context is not None:
        heads = []
        for head in range(len(rows)):
            keys, values = part.context.rows(part.layer, head, begin, part.context_end)
            heads.append(
                attention_state(
                    rows[head : head + 1], to_tensor(keys)[None], to_tensor(values)[None], scale
                )
            )
        outputs, lses = zip(*heads, strict=True)
        state = merge(state, (torch.cat(outputs), torch.cat(lses)))
    return _by_token(state, num_queries)


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
        requests = [parts[number].native(tokens[number], retrieval) for number in numbers]
        groups.append(_C.host.HostGroup(requests, _native_links(parts[numbers[0]], retrieval)))
    return groups


def _native_links(part: HostPart, retrieval: Retrieval) -> list[tuple[Any, list[tuple[int, int]]]]:
    """Of the context: searches, and what is read besides."""
    if part.context is None:
        return []
    links = []
    for link in part.context.links(part.context_end):
        searched = part.searched(link)
        read = [(0, searched.begin), (searched.end, link.end - link.begin)]
        links.append((retrieval.native(searched), read))
    return links


def _round_up(num_tokens: int) -> int:
    return -(-num_tokens // MEAN_TOKENS) * MEAN_TOKENS


def _by_kv_head(query: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """[tokens, heads, size] -> [kv_heads, group * tokens, size]: the tokens of a head in turn."""
    return query.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)


def _by_token(state: State, num_tokens: int) -> State:
    """The reverse: [tokens, heads, ...]."""
    output, lse = (part.unflatten(1, (-1, num_tokens)) for part in state)
    return output.permute(2, 0, 1, 3).flatten(1, 2), lse.permute(2, 0, 1).flatten(1, 2)
