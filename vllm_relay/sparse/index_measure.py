# SPDX-License-Identifier: Apache-2.0
"""What a built index finds at each width, measured with queries of its head."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from vllm_relay.sparse.attention import SparseLayer, attend
from vllm_relay.sparse.blocks import BlockIndex
from vllm_relay.sparse.coarse import CoarseIndex
from vllm_relay.sparse.elements import Elements, as_elements
from vllm_relay.sparse.face import CompiledIndex, key_bytes, with_width
from vllm_relay.sparse.head_profile import ExactAnswer, MeasuredSearch, grouped_queries
from vllm_relay.sparse.index import SearchResult
from vllm_relay.sparse.key_codes import row_bytes
from vllm_relay.sparse.query_types import QueryType
from vllm_relay.sparse.search_cost import SearchWork

WIDTH_STEP = 1.4
ENOUGH = 1.02
"""Wider searches cannot do better than the exact answer; this near to it is the end."""
MOST_DISTANCES = 0.6
"""Of the keys: a search that scores more is slower than reading all of them in order."""
HOPELESS = 10.0
"""A width whose error on the first queries is this many times too large is not measured on."""
_FIRST_TOKENS = 6
_TIMED_PASSES = 2
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
    from_default_width: bool = False,
    is_timed: bool = False,
) -> list[MeasuredSearch]:
    """Searches with the queries of the sample, ever wider, until the error is at most `max_error`
    or nearly that of the exact answer, and once more. Widths that are far from it are left out.

    Args:
        values: [n, value_size].
        exact: `exact_attention` of the keys of the index, or of its first `prefix_len`.
        answers: exact answers, of a profile, to the query types that are asked.
        from_default_width: nothing narrower than what the index searches where a query says no
            width. That finds the best keys of rare queries too, of which a sample may hold none.
        is_timed: also take the time. Plans know more then, but depend on who else uses the machine.

    Returns:
        for each query type and width what was found.
    """
    found = []
    few = ExactAttention(*(part[:_FIRST_TOKENS] for part in exact))
    most_distances = MOST_DISTANCES * (index.num_keys if prefix_len is None else prefix_len)
    for answer in answers:
        enough = max(max_error, ENOUGH * (answer.error_p99 or 0.0))
        goes_on = 2
        least_width = index.width_of(with_width(answer.query, None)) if from_default_width else 1
        for width in widths(index, least_width):
            query = with_width(answer.query, width)
            search = _measure(index, values, few, query, scale, prefix_len, False)
            is_last = width is None or search.distances > most_distances
            if _error(search) > HOPELESS * enough and not is_last:
                continue
            search = _measure(index, values, exact, query, scale, prefix_len, is_timed)
            found.append(search)
            goes_on -= _error(search) <= enough
            if is_last or goes_on == 0:
                break
        else:
            # none was near: the widest says so
            if not any(each.query is search.query for each in found):
                found.append(search)
    return found


def _error(search: MeasuredSearch) -> float:
    assert search.error_p99 is not None
    return search.error_p99


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


def measure_full(
    keys: Elements, values: Elements, exact: ExactAttention, scale: float | None = None
) -> MeasuredSearch:
    """Attention over all of the keys [n, d] and values [n, value_size], timed."""
    num_keys, group = keys.shape[0], exact.queries.shape[1]
    everything = [np.arange(num_keys, dtype=np.int32)] * group
    groups = exact.queries[:_FIRST_TOKENS]

    def run(rows: np.ndarray) -> None:
        attend(rows, keys, values, everything, scale)

    return MeasuredSearch(
        "full", None, 0, 0, 0, num_keys * group, 1.0, 1.0, 0.0, 0.0, _cpu_us(run, groups)
    )


def _measure(
    index: CompiledIndex,
    values: Elements,
    exact: ExactAttention,
    query: QueryType,
    scale: float | None,
    prefix_len: int | None,
    is_timed: bool,
) -> MeasuredSearch:
    results, lses, outputs = [], [], []
    for rows in exact.queries:
        results.append(index.search(rows, query, prefix_len=prefix_len))
        state = attend(rows, index.keys, values, results[-1].ids, scale)
        lses.append(state.lse)
        outputs.append(state.output)
    work = mean_work(index, results, exact.queries.shape[1])
    masses = np.minimum(np.exp(np.stack(lses) - exact.lse), 1)
    errors = np.linalg.norm(np.stack(outputs) - exact.outputs, axis=2)
    errors /= np.maximum(np.linalg.norm(exact.outputs, axis=2), np.finfo(np.float32).tiny)
    time_us = None
    if is_timed:
        layer = SparseLayer([index], [values])

        def run(rows: np.ndarray) -> None:
            layer.attend(rows[None], query, scale=scale, prefix_len=prefix_len, threads=1)

        time_us = _cpu_us(run, exact.queries)
    return MeasuredSearch(
        index.kind, query, work.distances, work.hops, work.rescored, work.found,
        float(masses.mean()), float(np.quantile(masses, 0.01)), float(np.quantile(errors, 0.99)),
        float(errors.max()), time_us,
    )  # fmt: skip


def _cpu_us(run: Callable[[np.ndarray], object], groups: np.ndarray) -> float:
    """Of one call, on the calling thread; other users of the machine can only add to it."""
    times = []
    for _ in range(_TIMED_PASSES):
        began_ns = time.thread_time_ns()
        for rows in groups:
            run(rows)
        times.append((time.thread_time_ns() - began_ns) / len(groups) / 1e3)
    return min(times)
