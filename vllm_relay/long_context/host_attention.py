# SPDX-License-Identifier: Apache-2.0
"""Attention of a step's queries over tokens in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_relay.long_context.host_sequence import HostLayer
from vllm_relay.long_context.window import Residency
from vllm_relay.sparse.context_store import StoredContext
from vllm_relay.sparse.options import DBOptions
from vllm_relay.sparse.partial_attention import attention_state, merge
from vllm_relay.sparse.query_types import Dipr
from vllm_relay.sparse.retrieval import ContextPart, SessionStats, retrieve
from vllm_relay.sparse.tensors import to_tensor

RECENT_TOKENS = 64
"""Last tokens of a stored context that every query reads."""

State = tuple[torch.Tensor, torch.Tensor]
"""Output float32 [kv_heads, rows, size] and log-sum-exp float32 [kv_heads, rows]."""


@dataclass(frozen=True)
class Retrieval:
    """What a decoded token reads of the tokens in host memory.

    Attributes:
        query: what is asked of indexes that are built while a request runs; None: all is read.
        options: how stored contexts are asked, whose heads may have plans.
    """

    query: Dipr | None
    options: DBOptions


@dataclass
class HostPart:
    """The host's part of a request in one layer: a stored context, and what was computed since.

    Attributes:
        own: of the tokens behind the context.
        context: None if there is none; then `own` begins with the first token.
        layer: number of the layer in the context.
        num_tokens: of the request, those of the step included.
        sink_end: the tokens before it are always read, here or on the device.
    """

    own: HostLayer
    context: StoredContext | None
    layer: int
    residency: Residency
    num_tokens: int
    sink_end: int

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

    def context_window(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the tokens of the context that every query reads, float32; kept."""
        end = self.context_end
        if self.own.context_window is None or self.own.context_window[0] != end:
            first = self.context_rows(0, min(self.sink_end, end))
            last = self.context_rows(self.searched_end, end)
            window = [torch.cat(parts, 1).float() for parts in zip(first, last, strict=True)]
            self.own.context_window = end, window[0], window[1]
        return self.own.context_window[1:]

    @property
    def searched_end(self) -> int:
        """Up to where the context is searched, from `sink_end` on."""
        return max(min(self.sink_end, self.context_end), self.context_end - RECENT_TOKENS)


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
    query: torch.Tensor,
    scale: float,
    retrieval: Retrieval,
    stats: SessionStats,
) -> State:
    """Attention of one query token of each request over what its heads need of the host's tokens.

    Requests that read the same context to the same token search it together.

    Args:
        query: [requests, heads, head_size].

    Returns:
        as `attend_everything`, [requests, ...].
    """
    num_kv_heads = parts[0].own.keys.shape[0]
    states: list[list[State]] = []
    tops: list[torch.Tensor] = []
    for number, part in enumerate(parts):
        rows = _by_kv_head(query[number : number + 1], num_kv_heads).float()
        state, top = _read_exactly(part, rows, scale)
        states.append([state, *_search_own(part, rows, top, scale, retrieval, stats)])
        tops.append(top)
    for numbers in _sharing(parts):
        first = parts[numbers[0]]
        rows = _by_kv_head(query[numbers], num_kv_heads)  # the requests of a query head in turn
        top = torch.stack([tops[number] for number in numbers], 2).flatten(1)
        assert first.context is not None
        found = retrieve(
            ContextPart(first.context, first.layer, first.sink_end, first.searched_end),
            rows,
            top,
            scale=scale,
            options=retrieval.options,
            stats=stats,
            threads=torch.get_num_threads(),
        )
        outputs = found[0].unflatten(1, (-1, len(numbers)))
        lses = found[1].unflatten(1, (-1, len(numbers)))
        for place, number in enumerate(numbers):
            states[number].append((outputs[:, :, place], lses[:, :, place]))
    merged = [_merge_all(each) for each in states]
    outputs = torch.stack([output for output, _ in merged])  # [requests, kv_heads, group, size]
    lses = torch.stack([lse for _, lse in merged])
    return outputs.flatten(1, 2), lses.flatten(1, 2)


def _sharing(parts: Sequence[HostPart]) -> list[list[int]]:
    """Requests that search the same tokens of the same context."""
    groups: dict[tuple[int, int], list[int]] = {}
    for number, part in enumerate(parts):
        if part.context is not None:
            groups.setdefault((id(part.context), part.context_end), []).append(number)
    return list(groups.values())


def _read_exactly(part: HostPart, rows: torch.Tensor, scale: float) -> tuple[State, torch.Tensor]:
    """Attention over the host's tokens that every query reads, and the largest inner product with
    these and with those on the device, float32 [kv_heads, rows].

    Args:
        rows: float32 [kv_heads, rows, head_size].
    """
    begin, end = part.residency
    own = part.own
    indexed = own.index_up_to(max(part.sink_end, own.begin), end)
    recent = max(indexed, own.begin, end)
    if part.context is not None:
        attended = [part.context_window()]
    else:
        attended = [own.rows(begin, max(begin, min(part.sink_end, end)))]
    attended.append(own.rows(indexed, max(indexed, end)))
    # the host has a copy of what is on the device
    others = [own.rows(recent, part.num_tokens)]
    if part.context is None:
        others.append(own.rows(0, begin))
    keys = torch.cat([keys for keys, _ in (*attended, *others)], 1).float()
    values = torch.cat([values for _, values in attended], 1).float()
    products = rows @ keys.transpose(1, 2)
    logits = products[:, :, : values.shape[1]] * scale
    if values.shape[1]:
        state = logits.softmax(-1) @ values, logits.logsumexp(-1)
    else:
        state = torch.zeros_like(rows), logits.new_full(rows.shape[:2], -torch.inf)
    return state, products.amax(-1)


def _search_own(
    part: HostPart,
    rows: torch.Tensor,
    top: torch.Tensor,
    scale: float,
    retrieval: Retrieval,
    stats: SessionStats,
) -> list[State]:
    """Of every segment of tokens that the request has computed itself."""
    states: list[State] = []
    for segment in part.own.segments:
        assert retrieval.query is not None
        found, cost = segment.layer.attend(
            rows.numpy(),
            retrieval.query if segment.queries is None else segment.queries,
            scale=scale,
            window_max=top.numpy(),
            threads=torch.get_num_threads(),
        )
        states.append((torch.from_numpy(found.output), torch.from_numpy(found.lse)))
        stats.add(segment.end - segment.begin, cost, len(rows))
    return states


def _merge_all(states: Sequence[State]) -> State:
    """Of parts over disjoint sets of tokens."""
    if len(states) == 1:
        return states[0]
    lses = torch.stack([lse for _, lse in states])
    lse = lses.logsumexp(0)
    weights = (lses - torch.where(torch.isinf(lse), 0.0, lse)).exp()
    outputs = torch.stack([output for output, _ in states])
    return (outputs * weights[..., None]).sum(0), lse


def _by_kv_head(query: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """[tokens, heads, size] -> [kv_heads, group * tokens, size]: the tokens of a head in turn."""
    return query.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)


def _by_token(state: State, num_tokens: int) -> State:
    """The reverse: [tokens, heads, ...]."""
    output, lse = (part.unflatten(1, (-1, num_tokens)) for part in state)
    return output.permute(2, 0, 1, 3).flatten(1, 2), lse.permute(2, 0, 1).flatten(1, 2)
