# SPDX-License-Identifier: Apache-2.0
"""What the query heads of one token read of a stored context, found by its indexes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_relay.sparse.contexts.context_store import StoredContext
from vllm_relay.sparse.index.compiled_index import key_bytes
from vllm_relay.sparse.index.query_types import Dipr, QueryType
from vllm_relay.sparse.index.sparse_layer import AttentionState, LayerStats, attend, merge_states
from vllm_relay.sparse.plan.head_plan import HeadPlan
from vllm_relay.sparse.plan.options import DBOptions


class ContextPart(NamedTuple):
    """The tokens `begin` to `end` of one layer of a context; 0 is the first one of its own."""

    context: StoredContext
    layer: int
    begin: int
    end: int


def parts_of(context: StoredContext, layer: int, begin: int, end: int) -> list[ContextPart]:
    """The tokens `begin` to `end`, wherever they are in what the context continues."""
    links = context.links(end)
    return [
        ContextPart(link.context, layer, max(begin - link.begin, 0), link.end - link.begin)
        for link in links
        if link.end > begin or link is links[-1]  # where there are no tokens, there is a part
    ]


@dataclass
class SessionStats:
    """What the decode steps of a session read; summed over layers and kv heads.

    Attributes:
        searches: one for each step, layer and kv head; of an index, or of no index where a plan
            says to read everything.
        searched_tokens: tokens that these searches could have returned.
        retrieved_tokens: tokens that at least one query head of a search got.
        distances, bytes: as in `LayerStats`.
        dropped_mass: with `max_dropped_mass`, the largest bound of any search: at most this much of
            the attention weight of the searched tokens was left out. None as long as no search was
            asked for one.
    """

    searches: int = 0
    searched_tokens: int = 0
    retrieved_tokens: int = 0
    distances: int = 0
    bytes: int = 0
    dropped_mass: float | None = None

    def count(self, part: ContextPart, cost: LayerStats, num_heads: int) -> None:
        """Adds what `num_heads` kv heads read of a part."""
        dropped_mass = math.nan if cost.dropped_mass is None else np.nanmax(cost.dropped_mass)
        self.add(
            num_heads, num_heads * (part.end - part.begin), cost.retrieved_tokens, cost.distances,
            cost.bytes, float(dropped_mass),
        )  # fmt: skip

    def add(
        self,
        searches: int,
        searched_tokens: int,
        retrieved_tokens: int,
        distances: int,
        num_bytes: int,
        dropped_mass: float,
    ) -> None:
        """Adds searches; the largest `dropped_mass` of them is NaN if none was asked for one."""
        self.searches += searches
        self.searched_tokens += searched_tokens
        self.retrieved_tokens += retrieved_tokens
        self.distances += distances
        self.bytes += num_bytes
        if not math.isnan(dropped_mass):
            self.dropped_mass = max(self.dropped_mass or 0.0, dropped_mass)


def retrieve(
    parts: Sequence[ContextPart],
    query: torch.Tensor,
    window_max: torch.Tensor,
    *,
    scale: float,
    options: DBOptions,
    stats: SessionStats,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every query over the tokens of the parts that the plan of its head, or
    `options.query`, asks for.

    Args:
        parts: one or more, without a token in common.
        query: [kv_heads, group, head_size].
        window_max: float32 [kv_heads, group]; largest inner product of each query with what it
            reads besides.
        stats: counts what was read.

    Returns:
        output float32 [kv_heads, group, value_size] and log-sum-exp [kv_heads, group], on the
        device of `query`.

    Source: AlayaDB (2504.10326), section 7.1: the range reaches down from the window's best key,
        and a token limit filters the keys of a context of which a part is reused.
    """
    queries = query.float().cpu().numpy()
    tops = window_max.cpu().numpy()
    states = [_attend_part(each, queries, tops, scale, options, stats) for each in parts]
    state = states[0] if len(states) == 1 else merge_states(states)
    output, lse = (torch.from_numpy(each).to(query.device) for each in state)
    return output, lse


def _attend_part(
    part: ContextPart,
    queries: np.ndarray,
    tops: np.ndarray,
    scale: float,
    options: DBOptions,
    stats: SessionStats,
) -> AttentionState:
    asked = queries_of_heads(part, scale=scale, options=options)
    with part.context.reading():
        layer = part.context.layer(part.layer)
        if layer is None:
            states = [
                _attend_head(part, head, rows, asked[head], tops[head], scale, stats)
                for head, rows in enumerate(queries)
            ]
            return AttentionState(*(np.stack(each) for each in zip(*states, strict=True)))
        state, cost = layer.attend(
            queries, asked, scale=scale, begin=part.begin, prefix_len=part.end, window_max=tops
        )
        stats.count(part, cost, len(queries))
        return state


def queries_of_heads(
    part: ContextPart, *, scale: float, options: DBOptions
) -> list[QueryType | None]:
    """What the index of each kv head is asked; None to read all of the part."""
    asked = []
    for head in range(part.context.shape.num_kv_heads):
        planned = query_of_head(part.context.plan(part.layer, head), part.end, options)
        asked.append(None if planned is None else _query_type(planned, options, scale))
    return asked


def query_of_head(plan: HeadPlan | None, prefix_len: int, options: DBOptions) -> QueryType | None:
    """What a kv head's index is asked; None to read all of the context.

    A query that was given is asked; a plan made for it has the width. Without one, a plan is asked
    that keeps to `max_error`, or that reads at least what is asked without a plan: who reopens a
    folder may have other options than who stored it.
    """
    if plan is None or options.index != "auto":
        return options.query
    planned = plan.query_for(prefix_len)
    if options.given_query is not None:
        has_width = planned is not None and replace(planned, width=None) == options.query
        return planned if has_width else options.query
    is_enough = plan.keeps_to(options.max_error) or _reaches(planned, options.query)
    return planned if is_enough else options.query


def _reaches(planned: QueryType | None, query: QueryType) -> bool:
    """Whether a planned range holds that of `query`; widths of plans are never below an index's
    default."""
    if planned is None:
        return True
    if not (isinstance(planned, Dipr) and isinstance(query, Dipr)):
        return False
    if planned.alpha is None or query.alpha is None or planned.scale != query.scale:
        return False
    return planned.alpha <= query.alpha


def _query_type(query: QueryType, options: DBOptions, scale: float) -> QueryType:
    limits = [query.max_dropped_mass, options.max_dropped_mass]
    given = [limit for limit in limits if limit is not None]
    if given:
        bounded: dict[str, Any] = {"max_dropped_mass": min(given)}
        if isinstance(query, Dipr):
            bounded["estimate"] = False
        query = replace(query, **bounded)
    return query if query.scale is not None else replace(query, scale=scale)


def _attend_head(
    part: ContextPart,
    head: int,
    queries: np.ndarray,
    query: QueryType | None,
    window_max: np.ndarray,
    scale: float,
    stats: SessionStats,
) -> AttentionState:
    """One kv head, whose rows may have to be gathered first."""
    if query is None:
        keys, values = part.context.own_rows(part.layer, head, part.begin, part.end)
        num_tokens = part.end - part.begin
        places = [np.arange(num_tokens, dtype=np.int32)] * len(queries)
        read_bytes = keys.data.nbytes + len(queries) * values.data.nbytes
        cost = LayerStats(0, 0, read_bytes, None, num_tokens)
    else:
        found = part.context.index(part.layer, head).search(
            queries, query, begin=part.begin, prefix_len=part.end, window_max=window_max
        )
        keys, values, places = part.context.gather(part.layer, head, found.ids)
        distances, hops, read_bytes, dropped_mass = found.stats
        read_bytes += sum(map(len, found.ids)) * key_bytes(values)
        num_retrieved = len(np.unique(np.concatenate(found.ids)))
        cost = LayerStats(distances, hops, read_bytes, dropped_mass, num_retrieved)
    stats.count(part, cost, 1)
    return attend(queries, keys, values, places, scale)
