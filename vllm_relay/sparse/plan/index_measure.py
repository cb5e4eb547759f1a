# SPDX-License-Identifier: Apache-2.0
"""What a built index finds at each width, measured with queries of its head."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from vllm_relay.sparse.index.blocks import BlockIndex
from vllm_relay.sparse.index.coarse import CoarseIndex
from vllm_relay.sparse.index.compiled_index import CompiledIndex, key_bytes
from vllm_relay.sparse.index.elements import Elements, as_elements
from vllm_relay.sparse.index.key_codes import row_bytes
from vllm_relay.sparse.index.key_index import SearchResult
from vllm_relay.sparse.index.query_types import QueryType
from vllm_relay.sparse.index.sparse_layer import AttentionState, attend
from vllm_relay.sparse.plan.error_bound import error_p99, error_p99_upper
from vllm_relay.sparse.plan.head_profile import ExactAnswer, MeasuredSearch, grouped_queries
from vllm_relay.sparse.plan.search_cost import SearchWork

WIDTH_STEP = 1.4
ENOUGH = 1.02
"""Wider searches cannot do better than the exact answer; this near to it is the end."""
MOST_DISTANCES = 0.6
"""Of the keys: a graph whose search scores more is slower than reading all of them in order. Lists
are read in order: all of them take no longer than a flat index, which has to be exact."""
HOPELESS = ((6, 10.0), (18, 2.5), (64, 1.5))
"""Tokens, and how many times too large their p99 may be for a width to be measured with more."""
_LOST_GROWTH = 2.0
"""A narrow search loses much for few queries, but then for all heads of a token. What it adds to
the p99 of the exact answers counts so many times more in the bound: where widths lost a little for
96 tokens of benchmarks/sparse, 384 others lost three to four times as much."""
_WORK_EVERY = 4
"""One token in so many tells the work of a search whose errors are known."""
_BLOCK_QUERIES = 32


class ExactAttention(NamedTuple):
    """Of a sample of queries over all keys: float32 [tokens, group, d], [tokens, group] and
    [tokens, group, value_size]."""

    queries: np.ndarray
    lse: np.ndarray
    outputs: np.ndarray


def exact_attention(
    keys: Any, values: Any, queries: Any, scale: float | None = None
) -> ExactAttention:
    """
    Args:
        keys, values: [n, d] and [n, value_size].
        queries: as for `profile_head`.
        scale: 1 / sqrt(d) if None.

    Raises:
        ValueError: shapes do not fit, or something is not finite.
    """
    key_rows = as_elements("keys", keys).to_float32()
    value_rows = as_elements("values", values).to_float32()
    grouped = grouped_queries(queries, key_rows.shape[1])
    factor = np.float32(1 / math.sqrt(key_rows.shape[1]) if scale is None else scale)
    rows = grouped.reshape(-1, grouped.shape[2])
    lse = np.empty(len(rows), np.float32)
    outputs = np.empty((len(rows), value_rows.shape[1]), np.float32)
    for begin in range(0, len(rows), _BLOCK_QUERIES):
        block = slice(begin, begin + _BLOCK_QUERIES)
        weights = (rows[block] * factor) @ key_rows.T
        top = weights.max(axis=1, keepdims=True)
        weights -= top
        np.exp(weights, out=weights)
        totals = weights.sum(axis=1, dtype=np.float64)
        lse[block] = top[:, 0] + np.log(totals)
        outputs[block] = (weights @ value_rows) / totals[:, None]
    shape = grouped.shape[:2]
    return ExactAttention(grouped, lse.reshape(shape), outputs.reshape(*shape, -1))


def measure_index(
    index: CompiledIndex,
    values: Elements,
    exact: ExactAttention,
    answers: Sequence[ExactAnswer],
    *,
    scale: float | None = None,
    prefix_len: int | None = None,
    max_error: float = 0.0,
    min_mass: float = 0.0,
    from_default_width: bool = False,
) -> list[MeasuredSearch]:
    """Searches with the queries of the sample, ever wider, until the error is at most `max_error`
    or nearly that of the exact answer, and once more; both with the margin of `error_bound`. Widths
    that are far from it are left out.

    With `min_mass` it goes on until 99% of the queries get that much of the attention weight too.

    Args:
        values: [n, value_size].
        exact: `exact_attention` of the keys of the index, or of its first `prefix_len`.
        answers: exact answers, of a profile, to the query types that are asked.
        from_default_width: nothing narrower than what the index searches where a query says no
            width. That finds the best keys of rare queries too, of which a sample may hold none.

    Returns:
        for each query type and width what was found.
    """
    found = []
    most_distances = math.inf
    if index.kind == "graph":
        most_distances = MOST_DISTANCES * (index.num_keys if prefix_len is None else prefix_len)
    for answer in answers:
        if index.kind == "flat" and answer.error_p99 is not None:
            found.append(_exact_search(index, values, exact, answer, scale, prefix_len))
            continue
        enough = max(max_error, ENOUGH * (answer.error_bound or 0.0))
        goes_on = 2
        least_width = index.width_of(replace(answer.query, width=None)) if from_default_width else 1
        for width in widths(index, least_width):
            query = replace(answer.query, width=width)
            measured = _Searches(index, values, exact, query, scale, prefix_len)
            is_last = is_hopeless = False
            for tokens, factor in HOPELESS:
                search = measured.of_first(tokens)
                is_last = width is None or search.distances > most_distances
                is_hopeless = _known(search.error_p99) > factor * enough
                if is_hopeless or is_last:
                    break
            if is_hopeless and not is_last:
                continue
            search = _with_lost(measured.of_first(len(exact.queries)), answer)
            found.append(search)
            goes_on -= _known(search.error_bound) <= enough and search.mass_p1 >= min_mass
            if is_last or goes_on == 0:
                break
        else:
            # none was near: the widest says so
            if not any(each.query is search.query for each in found):
                found.append(search)
    return found


def _with_lost(search: MeasuredSearch, answer: ExactAnswer) -> MeasuredSearch:
    """With a bound that allows for what the search loses of the exact answer."""
    if answer.error_p99 is None:
        return search
    lost = max(0.0, _known(search.error_p99) - answer.error_p99)
    return replace(search, error_p99_upper=_known(search.error_bound) + _LOST_GROWTH * lost)


def _known(error: float | None) -> float:
    assert error is not None
    return error


def widths(index: CompiledIndex, least: int = 1) -> Iterator[int | None]:
    """What is worth trying from `least` on, rising; None for an index that has no width."""
    if index.kind == "flat":
        yield None
        return
    width, most = 32.0, index.num_keys
    if isinstance(index, CoarseIndex):
        width, most = 4.0, index.num_lists
    elif isinstance(index, BlockIndex):
        width, most = 4.0, index.num_blocks
    width = max(width, float(min(least, most)))
    while width < most:
        yield round(width)
        width *= WIDTH_STEP
    yield most


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


def measure_full(num_keys: int, group: int) -> MeasuredSearch:
    """What attention over all keys finds."""
    return MeasuredSearch(
        "full", None, 0, 0, 0, num_keys * group, 1.0, 1.0, 0.0, 0.0, error_p99_upper=0.0
    )


def _exact_search(
    index: CompiledIndex,
    values: Elements,
    exact: ExactAttention,
    answer: ExactAnswer,
    scale: float | None,
    prefix_len: int | None,
) -> MeasuredSearch:
    """Of an index that finds the exact answer: the profile knows its errors."""
    some = ExactAttention(*(part[::_WORK_EVERY] for part in exact))
    query = replace(answer.query, width=None)
    search = _Searches(index, values, some, query, scale, prefix_len).of_first(len(some.queries))
    return replace(
        search,
        found=answer.mean_tokens * exact.queries.shape[1],
        mass_mean=answer.mass_mean,
        mass_p1=answer.mass_p1,
        error_p99=answer.error_p99,
        error_max=answer.error_max,
        error_p99_upper=answer.error_bound,
    )


class _Searches:
    """Of one query type at one width, with more and more of the sample."""

    def __init__(
        self,
        index: CompiledIndex,
        values: Elements,
        exact: ExactAttention,
        query: QueryType,
        scale: float | None,
        prefix_len: int | None,
    ) -> None:
        self._index, self._values, self._exact = index, values, exact
        self._query, self._scale, self._prefix_len = query, scale, prefix_len
        self._results: list[SearchResult] = []
        self._states: list[AttentionState] = []

    def of_first(self, tokens: int) -> MeasuredSearch:
        index, exact = self._index, self._exact
        for rows in exact.queries[len(self._results) : tokens]:
            result = index.search(rows, self._query, prefix_len=self._prefix_len)
            self._results.append(result)
            self._states.append(attend(rows, index.keys, self._values, result.ids, self._scale))
        work = mean_work(index, self._results, exact.queries.shape[1])
        lses = np.stack([state.lse for state in self._states])
        masses = np.minimum(np.exp(lses - exact.lse[: len(lses)]), 1)
        outputs = exact.outputs[: len(lses)]
        errors = np.stack([state.output for state in self._states]) - outputs
        lengths = np.maximum(np.linalg.norm(outputs, axis=2), np.finfo(np.float32).tiny)
        errors = np.linalg.norm(errors, axis=2) / lengths
        return MeasuredSearch(
            index.kind, self._query, work.distances, work.hops, work.rescored, work.found,
            float(masses.mean()), float(np.quantile(masses, 0.01)), error_p99(errors),
            float(errors.max()), error_p99_upper=error_p99_upper(errors),
        )  # fmt: skip
