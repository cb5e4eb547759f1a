# SPDX-License-Identifier: Apache-2.0
"""Some queries of a kv head with their exact attention, and what searches find for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from vllm_relay.sparse.index.coarse import CoarseIndex
from vllm_relay.sparse.index.compiled_index import CompiledIndex, key_bytes
from vllm_relay.sparse.index.elements import Elements, as_elements
from vllm_relay.sparse.index.key_codes import row_bytes
from vllm_relay.sparse.index.key_index import SearchResult
from vllm_relay.sparse.index.query_types import QueryType
from vllm_relay.sparse.index.sparse_layer import attend
from vllm_relay.sparse.plan.search_cost import SearchWork

_BLOCK_QUERIES = 32
_DESIGN_EFFECT = 3.0
"""The queries of one token err alike: so many tell as much as one alone. With the four query heads
of benchmarks/sparse it is 1.2 to 3.0."""
_DEVIATIONS = 1.6
"""Of a normal distribution, 95% lies below so many above its mean."""
_GROWTH_BEYOND = 50.0
"""How an error grows, relative to the largest of a sample, with the quantile behind its end."""


class ExactAttention(NamedTuple):
    """Of queries over all keys: log-sum-exps float32 [tokens, group], outputs float32
    [tokens, group, value_size], and the keys with the largest scores, int64 [tokens, group]."""

    lse: np.ndarray
    outputs: np.ndarray
    best: np.ndarray


class Found(NamedTuple):
    """What the searches of a sample found.

    Attributes:
        work: of one search, on average, for the queries of one token.
        tokens_p99: 99% of the queries got at most so many.
        mass_p1: attention weight that 99% of the queries got at least.
        error_upper: `error_p99_upper` of the relative L2 errors of the attention output.
    """

    work: SearchWork
    tokens_p99: float
    mass_p1: float
    error_upper: float


class HeadSample:
    """Queries of some tokens, which see the first keys of a context.

    Args:
        keys, values: of the whole context, [n, d] and [n, value_size].
        queries: [tokens, group, d], of all query heads that share the keys.
        num_keys: how many of the keys the queries see.
        scale: of the scores in the softmax; 1 / sqrt(d) if None.

    Attributes:
        exact: the attention of these queries.
        row_sizes: of a key, as `SearchCost.time_us` takes them.
    """

    def __init__(
        self,
        keys: Elements,
        values: Elements,
        queries: np.ndarray,
        num_keys: int,
        scale: float | None = None,
    ) -> None:
        self.queries, self.num_keys = queries, num_keys
        self._values, self._scale = values, scale
        self.row_sizes = {"head_size": keys.shape[1], "key_bytes": key_bytes(keys)}
        self.exact = exact_attention(
            keys.rows(0, num_keys), values.rows(0, num_keys), queries, scale
        )

    @property
    def group(self) -> int:
        return self.queries.shape[1]

    @property
    def hub_statistic(self) -> float:
        """Different best keys, as a fraction of the queries."""
        return len(np.unique(self.exact.best)) / self.exact.best.size

    def search(self, index: CompiledIndex, query: QueryType) -> Found:
        """Searches an index over the whole context, and attends what each query got of the keys
        that it sees. Not timed, so that a context that is stored again gets the same plan."""
        results = [index.search(rows, query, prefix_len=self.num_keys) for rows in self.queries]
        states = [
            attend(rows, index.keys, self._values, result.ids, self._scale)
            for rows, result in zip(self.queries, results, strict=True)
        ]
        outputs = np.stack([state.output for state in states])
        lengths = np.linalg.norm(self.exact.outputs, axis=2)
        errors = np.linalg.norm(outputs - self.exact.outputs, axis=2)
        errors /= np.maximum(lengths, np.finfo(np.float32).tiny)
        masses = np.exp(np.stack([state.lse for state in states]) - self.exact.lse)
        tokens = [len(ids) for result in results for ids in result.ids]
        work = mean_work(index, results, self.group)
        if index.kind == "flat":
            work = replace(work, num_keys=self.num_keys)  # it scans no others
        elif index.kind == "graph":
            work = replace(work, filtered_hops=work.hops * (1 - self.num_keys / index.num_keys))
        return Found(
            work,
            float(np.quantile(tokens, 0.99)),
            float(np.quantile(np.minimum(masses, 1), 0.01)),
            error_p99_upper(errors),
        )


def exact_attention(
    keys: Any, values: Any, queries: np.ndarray, scale: float | None = None
) -> ExactAttention:
    """
    Args:
        keys, values: [n, d] and [n, value_size].
        queries: float32 [tokens, group, d].
        scale: 1 / sqrt(d) if None.

    Raises:
        ValueError: something is not finite.
    """
    key_rows = as_elements("keys", keys).to_float32()
    value_rows = as_elements("values", values).to_float32()
    factor = np.float32(1 / math.sqrt(key_rows.shape[1]) if scale is None else scale)
    rows = queries.reshape(-1, queries.shape[2])
    lse = np.empty(len(rows), np.float32)
    outputs = np.empty((len(rows), value_rows.shape[1]), np.float32)
    best = np.empty(len(rows), np.int64)
    for begin in range(0, len(rows), _BLOCK_QUERIES):
        block = slice(begin, begin + _BLOCK_QUERIES)
        weights = (rows[block] * factor) @ key_rows.T
        best[block] = weights.argmax(axis=1)
        top = weights.max(axis=1, keepdims=True)
        weights -= top
        np.exp(weights, out=weights)
        totals = weights.sum(axis=1, dtype=np.float64)
        lse[block] = top[:, 0] + np.log(totals)
        outputs[block] = (weights @ value_rows) / totals[:, None]
    shape = queries.shape[:2]
    return ExactAttention(lse.reshape(shape), outputs.reshape(*shape, -1), best.reshape(shape))


def error_p99_upper(errors: np.ndarray) -> float:
    """An upper confidence bound of the 99% quantile: in about nineteen samples of twenty, it is at
    least that of all queries.

    It is the quantile that lies 1.6 standard deviations of the number of larger errors further out;
    so heads with long tails get a wide margin, others a narrow one. Where a sample is too small to
    have that quantile, the largest error grows by what is missing.

    Args:
        errors: [queries], at least one.

    Source: order statistics as confidence limits of quantiles: David and Nagaraja, Order
    Statistics, section 7.1, in the normal approximation of the binomial distribution.
    """
    quantile = 0.99 + _DEVIATIONS * math.sqrt(0.99 * 0.01 * _DESIGN_EFFECT / errors.size)
    bound = float(np.quantile(errors, min(quantile, 1.0)))
    return bound * (1 + _GROWTH_BEYOND * max(0.0, quantile - 1))


def mean_work(index: CompiledIndex, results: Sequence[SearchResult], group: int) -> SearchWork:
    """Of one of these searches, of `group` queries each."""
    counts = []
    for result in results:
        stats = result.stats
        read = stats.bytes - stats.distances * row_bytes(index.head_size)
        rescored = (read - stats.hops * index.hop_bytes) / key_bytes(index.keys)
        counts.append((stats.distances, stats.hops, rescored, sum(map(len, result.ids))))
    distances, hops, rescored, found = np.mean(counts, axis=0).tolist()
    centres = index.num_lists if isinstance(index, CoarseIndex) else 0
    return SearchWork(index.kind, index.num_keys, group, distances, hops, centres, rescored, found)
