# SPDX-License-Identifier: Apache-2.0
"""What the query heads of one token read of a stored context, found by its indexes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from vllm_relay.sparse.attention import attend
from vllm_relay.sparse.context_store import StoredContext
from vllm_relay.sparse.elements import Elements
from vllm_relay.sparse.head_plan import HeadPlan
from vllm_relay.sparse.options import DBOptions
from vllm_relay.sparse.query_types import Dipr, QueryType


@dataclass
class SessionStats:
    """What the decode steps of a session read; summed over layers and kv heads.

    Attributes:
        searches: one for each step, layer and kv head; of an index, or of no index where a plan
            says to read everything.
        searched_tokens: tokens that these searches could have returned.
        retrieved_tokens: tokens that at least one query head of a search got.
        distances, bytes: as in `SearchStats`.
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


class ContextPart(NamedTuple):
    """The tokens `begin` to `end` of one layer of a context."""

    context: StoredContext
    layer: int
    begin: int
    end: int


def retrieve(
    part: ContextPart,
    query: torch.Tensor,
    window_max: torch.Tensor,
    *,
    scale: float,
    options: DBOptions,
    stats: SessionStats,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every query over the tokens of the part that the plan of its head, or
    `options.query`, asks for.

    Args:
        query: [kv_heads, group, head_size].
        window_max: float32 [kv_heads, group]; largest inner product of each query with what it
            reads besides.
        stats: counts what was read.

    Returns:
        output float32 [kv_heads, group, value_size] and the natural logarithm of the softmax
        denominator [kv_heads, group], on the device of `query`.

    Source: AlayaDB (2504.10326), section 7.1: the range reaches down from the window's best key,
        and a token limit filters the keys of a context of which a part is reused.
    """
    queries = query.float().cpu().numpy()
    tops = window_max.cpu().numpy()
    states = []
    for head, rows in enumerate(queries):
        asked = query_of_head(part.context.plan(part.layer, head), part.end, options)
        if asked is None:
            keys, values, places = _everything(part, head, len(rows), stats)
        else:
            query_type = _query_type(asked, options, scale)
            ids = _search(part, head, rows, query_type, tops[head], stats)
            keys, values, places = part.context.gather(part.layer, head, ids)
        states.append(attend(rows, keys, values, places, scale))
    outputs, lses = (np.stack(each) for each in zip(*states, strict=True))
    return torch.from_numpy(outputs).to(query.device), torch.from_numpy(lses).to(query.device)


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
    if options.max_dropped_mass is not None:
        query = replace(query, max_dropped_mass=options.max_dropped_mass)
    return query if query.scale is not None else replace(query, scale=scale)


def _everything(
    part: ContextPart, head: int, num_queries: int, stats: SessionStats
) -> tuple[Elements, Elements, list[np.ndarray]]:
    """Keys and values of the part, and their places for each query."""
    num_tokens = part.end - part.begin
    stats.searches += 1
    stats.searched_tokens += num_tokens
    stats.retrieved_tokens += num_tokens
    keys, values = part.context.rows(part.layer, head, part.begin, part.end)
    return keys, values, [np.arange(num_tokens, dtype=np.int32)] * num_queries


def _search(
    part: ContextPart,
    head: int,
    queries: np.ndarray,
    query: QueryType,
    window_max: np.ndarray,
    stats: SessionStats,
) -> list[np.ndarray]:
    """Ids of what each of one kv head's queries retrieves of the part."""
    result = part.context.index(part.layer, head).search(
        queries, query, begin=part.begin, prefix_len=part.end, window_max=window_max
    )
    stats.searches += 1
    stats.searched_tokens += part.end - part.begin
    stats.retrieved_tokens += len(np.unique(np.concatenate(result.ids)))
    stats.distances += result.stats.distances
    stats.bytes += result.stats.bytes
    if result.stats.dropped_mass is not None:
        largest = float(result.stats.dropped_mass.max())
        stats.dropped_mass = max(stats.dropped_mass or 0.0, largest)
    return result.ids
