# SPDX-License-Identifier: Apache-2.0
"""What the query heads of one token read of a stored context, found by its indexes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from vllm_relay.sparse.attention import attend
from vllm_relay.sparse.context_store import StoredContext
from vllm_relay.sparse.head_plan import HeadPlan
from vllm_relay.sparse.options import DBOptions
from vllm_relay.sparse.partial_attention import attention_state
from vllm_relay.sparse.query_types import Dipr, QueryType, TopK
from vllm_relay.sparse.tensors import to_tensor


@dataclass
class SessionStats:
    """What the decode steps of a session read; summed over layers and kv heads.

    Attributes:
        searches: searches of an index, one for each step, layer and kv head.
        searched_tokens: tokens that these searches could have returned.
        retrieved_tokens: tokens that at least one query head of a search got.
        distances, bytes: as in `SearchStats`.
        dense_reads: searches after which the whole context was read, for `max_dropped_mass`.
    """

    searches: int = 0
    searched_tokens: int = 0
    retrieved_tokens: int = 0
    distances: int = 0
    bytes: int = 0
    dense_reads: int = 0


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
    window_lse: torch.Tensor,
    *,
    scale: float,
    options: DBOptions,
    stats: SessionStats,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every query over the tokens of the part that `options.query` asks for.

    Args:
        query: [kv_heads, group, head_size].
        window_max, window_lse: float32 [kv_heads, group]; largest inner product and log-sum-exp of
            what each query reads besides.
        stats: counts what was read.

    Returns:
        output float32 [kv_heads, group, value_size] and the natural logarithm of the softmax
        denominator [kv_heads, group], on the device of `query`.

    Source: AlayaDB (2504.10326), section 7.1: the range reaches down from the window's best key,
        and a token limit filters the keys of a context of which a part is reused.
    """
    queries = query.float().cpu().numpy()
    tops, window_lses = window_max.cpu().numpy(), window_lse.cpu().numpy()
    states = []
    for head, rows in enumerate(queries):
        asked = query_of_head(part.context.plan(part.layer, head), part.end, options)
        if asked is None:
            states.append(_read_planned(part, head, rows, scale, stats))
            continue
        query_type = _query_type(asked, part.begin, scale)
        ids, scores = _search(part, head, rows, query_type, asked, tops[head], stats)
        keys, values, places = part.context.gather(part.layer, head, ids)
        state: tuple[np.ndarray, np.ndarray] = attend(rows, keys, values, places, scale)
        if options.max_dropped_mass is not None:
            bound = _dropped_mass_bound(
                query_type,
                scores,
                part.end - part.begin,
                tops[head],
                np.logaddexp(window_lses[head], state[1]),
                scale,
                rows.shape[1],
            )
            if (bound > options.max_dropped_mass).any():
                stats.dense_reads += 1
                state = _read_all(part, head, rows, scale)
        states.append(state)
    outputs, lses = (np.stack(each) for each in zip(*states, strict=True))
    return torch.from_numpy(outputs).to(query.device), torch.from_numpy(lses).to(query.device)


def query_of_head(plan: HeadPlan | None, prefix_len: int, options: DBOptions) -> QueryType | None:
    """What a kv head's index is asked; None to read all of the context. A query that was asked for
    is asked; a plan made for it has the width."""
    if plan is None or options.index != "auto":
        return options.query
    planned = plan.query_for(prefix_len)
    if "query" not in options.model_fields_set:
        return planned
    if planned is not None and replace(planned, width=None) == options.query:
        return planned
    return options.query


def _query_type(query: QueryType, num_sinks: int, scale: float) -> QueryType:
    if isinstance(query, TopK):
        # the sinks are in the index too, and mostly among the best
        return replace(query, k=query.k + num_sinks)
    if query.alpha is not None and query.scale is None:
        return replace(query, scale=scale)
    return query


def _search(
    part: ContextPart,
    head: int,
    queries: np.ndarray,
    query: QueryType,
    asked: QueryType,
    window_max: np.ndarray,
    stats: SessionStats,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Ids and scores of what one kv head's queries retrieve of the part.

    Args:
        query: of the index; `asked`: without the sinks.
    """
    result = part.context.index(part.layer, head).search(
        queries, query, prefix_len=part.end, window_max=window_max
    )
    limit = asked.k if isinstance(asked, TopK) else None
    ids, scores = [], []
    for found, score in zip(result.ids, result.scores, strict=True):
        ids.append(found[found >= part.begin][:limit])
        scores.append(score[found >= part.begin][:limit])
    stats.searches += 1
    stats.searched_tokens += part.end - part.begin
    stats.retrieved_tokens += len(np.unique(np.concatenate(ids)))
    stats.distances += result.stats.distances
    stats.bytes += result.stats.bytes
    return ids, scores


def _read_planned(
    part: ContextPart, head: int, queries: np.ndarray, scale: float, stats: SessionStats
) -> tuple[np.ndarray, np.ndarray]:
    """Attention over all of the part, where that is as fast as searching it."""
    everything = [np.arange(part.begin, part.end, dtype=np.int32)] * len(queries)
    stats.searches += 1
    stats.searched_tokens += part.end - part.begin
    stats.retrieved_tokens += part.end - part.begin
    keys, values, places = part.context.gather(part.layer, head, everything)
    return attend(queries, keys, values, places, scale)


def _read_all(
    part: ContextPart, head: int, queries: np.ndarray, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    keys, values = (
        to_tensor(rows)[None].float()
        for rows in part.context.rows(part.layer, head, part.begin, part.end)
    )
    output, lse = attention_state(torch.from_numpy(queries)[None], keys, values, scale)
    return output[0].numpy(), lse[0].numpy()


def _dropped_mass_bound(
    query: QueryType,
    scores: list[np.ndarray],
    num_tokens: int,
    window_max: np.ndarray,
    total_lse: np.ndarray,
    scale: float,
    head_size: int,
) -> np.ndarray:
    """[g]; the attention weight that tokens which were not retrieved can have at most, given that
    the index kept its promise.

    Args:
        scores: inner products of the retrieved tokens, best first.
        num_tokens: how many tokens could have been retrieved.
        window_max, total_lse: [g]; the largest inner product in the window, and the log-sum-exp of
            everything that was read.
    """
    bounds = []
    for i, found in enumerate(scores):
        unseen = num_tokens - len(found)
        if isinstance(query, Dipr):
            best = max(float(window_max[i]), float(found[0]) if len(found) else -math.inf)
            largest = best - query.range(head_size)
        else:
            largest = float(found[-1]) if len(found) else math.inf
        weight = math.exp(min(largest * scale - float(total_lse[i]), 0.0))
        bounds.append(min(1.0, unseen * weight))
    return np.array(bounds)
