# SPDX-License-Identifier: Apache-2.0
"""Searches and sparse attention in plain float64 numpy: the oracle of `vllm_relay.sparse`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from vllm_relay.sparse.index.query_types import QueryType, TopK, softmax_scale


def scores_of(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """[g, n] inner products in float64."""
    return np.asarray(queries, np.float64) @ np.asarray(keys, np.float64).T


def search(
    queries: np.ndarray,
    keys: np.ndarray,
    query: QueryType,
    *,
    begin: int = 0,
    prefix_len: int | None = None,
    window_max: Sequence[float] | np.ndarray | None = None,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """As `KeyIndex.search`, exactly: (ids, scores), best first, ties by id; with
    `max_dropped_mass`, as few more as bring the weight that is left out down to it."""
    keys = keys[begin:prefix_len]
    all_ids, all_scores = [], []
    for i, row in enumerate(scores_of(queries, keys)):
        order = np.lexsort((np.arange(len(row)), -row))
        wanted = len(order)
        if isinstance(query, TopK):
            wanted = min(query.k, wanted)
        elif len(order):
            best = row[order[0]]
            if window_max is not None:
                best = max(best, window_max[i])
            wanted = int((row >= best - query.range(keys.shape[1])).sum())
        if query.max_dropped_mass is not None and len(order):
            logits = row[order] * softmax_scale(query, keys.shape[1])
            weights = np.exp(logits - logits[0])
            left_out = 1 - np.cumsum(weights) / weights.sum()
            enough = int((left_out > query.max_dropped_mass).sum()) + 1
            wanted = max(wanted, min(enough, len(order)))
        order = order[:wanted]
        all_ids.append((order + begin).astype(np.int32))
        all_scores.append(row[order])
    return all_ids, all_scores


def attend(
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    ids: Sequence[np.ndarray],
    *,
    scale: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of query i over the keys `ids[i]`.

    Returns:
        output float64 [g, value size] and the logarithm of the softmax denominator [g]; 0 and -inf
        where there are no keys.
    """
    scale = 1 / math.sqrt(keys.shape[1]) if scale is None else scale
    output = np.zeros((len(queries), values.shape[1]))
    lse = np.full(len(queries), -np.inf)
    for i, chosen in enumerate(ids):
        if len(chosen) == 0:
            continue
        logits = scores_of(queries[i : i + 1], keys[chosen])[0] * scale
        top = logits.max()
        weights = np.exp(logits - top)
        output[i] = weights @ np.asarray(values[chosen], np.float64) / weights.sum()
        lse[i] = top + np.log(weights.sum())
    return output, lse


def dropped_mass(
    queries: np.ndarray,
    keys: np.ndarray,
    ids: Sequence[np.ndarray],
    *,
    scale: float | None = None,
) -> np.ndarray:
    """[g]; the part of each query's attention weight that lies on keys not in `ids[i]`."""
    scale = 1 / math.sqrt(keys.shape[1]) if scale is None else scale
    logits = scores_of(queries, keys) * scale
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    seen = [row[chosen].sum() for row, chosen in zip(weights, ids, strict=True)]
    return 1 - np.array(seen)
