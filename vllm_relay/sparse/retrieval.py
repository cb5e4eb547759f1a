# SPDX-License-Identifier: Apache-2.0
"""What the query heads of one token read of a stored context, found by its indexes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from vllm_relay.sparse.attention import attend
from vllm_relay.sparse.context_store import StoredContext
from vllm_relay.sparse.options import DBOptions
from vllm_relay.sparse.query_types import QueryType


@dataclass
class SessionStats:
    """What the decode steps of a session read; summed over layers and kv heads.

    Attributes:
        searches: searches of an index, one for each step, layer and kv head.
        searched_tokens: tokens that these searches could have returned.
        retrieved_tokens: tokens that at least one query head of a search got.
        distances, bytes: as in `SearchStats`.
        dropped_mass: with `max_dropped_mass`, the largest bound of any search: at most this much of
            the attention weight of the searched tokens was left out.
    """

    searches: int = 0
    searched_tokens: int = 0
    retrieved_tokens: int = 0
    distances: int = 0
    bytes: int = 0
    dropped_mass: float = 0.0


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
    """Attention of every query over the tokens of the part that `options.query` asks for.

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
    query_type = _query_type(options, scale)
    states = []
    for head, rows in enumerate(queries):
        ids = _search(part, head, rows, query_type, tops[head], stats)
        keys, values, places = part.context.gather(part.layer, head, ids)
        states.append(attend(rows, keys, values, places, scale))
    outputs, lses = (np.stack(each) for each in zip(*states, strict=True))
    return torch.from_numpy(outputs).to(query.device), torch.from_numpy(lses).to(query.device)


def _query_type(options: DBOptions, scale: float) -> QueryType:
    query = replace(options.query, max_dropped_mass=options.max_dropped_mass)
    return query if query.scale is not None else replace(query, scale=scale)


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
        stats.dropped_mass = max(stats.dropped_mass, float(result.stats.dropped_mass.max()))
    return result.ids
