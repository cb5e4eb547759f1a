# SPDX-License-Identifier: Apache-2.0
"""What searches of built indexes take, timed in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from vllm_relay.sparse.index.compiled_index import CompiledIndex
from vllm_relay.sparse.index.elements import Elements
from vllm_relay.sparse.index.query_types import QueryType
from vllm_relay.sparse.index.sparse_layer import SparseLayer, attend
from vllm_relay.sparse.plan.head_profile import MeasuredSearch

Run = Callable[[np.ndarray], np.ndarray]
"""Attention [group, value_size] of the queries [group, d] of one token."""
_FIRST_ROUNDS, _ROUNDS = 1, 4
_SLOWER = 1.4
"""What takes so many times as long as the fastest in the first rounds is not timed further."""


def full_run(
    keys: Elements, values: Elements, prefix_len: int | None = None, scale: float | None = None
) -> Run:
    """Attention over all of the first `prefix_len` keys [n, d] and values [n, value_size]."""
    num_keys = keys.shape[0] if prefix_len is None else prefix_len
    seen = keys.rows(0, num_keys), values.rows(0, num_keys)
    everything = np.arange(num_keys, dtype=np.int32)
    return lambda rows: attend(rows, *seen, [everything] * len(rows), scale).output


def search_run(
    index: CompiledIndex,
    values: Elements,
    query: QueryType,
    prefix_len: int | None = None,
    scale: float | None = None,
) -> Run:
    """A search of the first `prefix_len` keys of the index and attention over what it finds."""
    layer = SparseLayer([index], [values])

    def run(rows: np.ndarray) -> np.ndarray:
        state, _ = layer.attend(rows[None], query, scale=scale, prefix_len=prefix_len, threads=1)
        return state.output[0]

    return run


def with_times(
    searches: Sequence[MeasuredSearch],
    indexes: Sequence[CompiledIndex],
    keys: Elements,
    values: Elements,
    queries: np.ndarray,
    *,
    scale: float | None = None,
    prefix_len: int | None = None,
    max_error: float = 1.0,
) -> list[MeasuredSearch]:
    """Takes the times of those searches that are good enough to be chosen. Plans know more then,
    but depend on who else uses the machine.

    Args:
        searches: `measure_full` and `measure_index` of these indexes.
        keys, values: [n, d] and [n, value_size] of all of the context.
        queries: [tokens, group, d].
        prefix_len: how many of the keys count; None for all.
        max_error: searches whose `error_bound` is larger keep no time.
    """
    by_kind = {index.kind: index for index in indexes}
    runs: list[Run | None] = []
    for search in searches:
        if search.error_bound is None or search.error_bound > max_error:
            runs.append(None)
        elif search.query is None:
            runs.append(full_run(keys, values, prefix_len, scale))
        else:
            index = by_kind[search.kind]
            runs.append(search_run(index, values, search.query, prefix_len, scale))
    times = iter(times_us([run for run in runs if run is not None], queries))
    return [
        search if run is None else replace(search, time_us=next(times))
        for search, run in zip(searches, runs, strict=True)
    ]


def times_us(runs: Sequence[Run], groups: np.ndarray) -> list[float]:
    """Of one call of each, on the calling thread; other users of the machine can only add to it.
    Those that may be the fastest are timed more often, all with the same queries: one query may
    take many times as long as another.

    Args:
        groups: [tokens, group, d], queries.
    """
    times = in_turn(runs, groups, _FIRST_ROUNDS).min(axis=1, initial=np.inf)
    near = np.flatnonzero(times <= _SLOWER * times.min(initial=np.inf))
    more = in_turn([runs[i] for i in near], groups, _ROUNDS).min(axis=1, initial=np.inf)
    times[near] = np.minimum(times[near], more)
    return times.tolist()


def in_turn(runs: Sequence[Run], groups: np.ndarray, rounds: int) -> np.ndarray:
    """[runs, rounds]; microseconds of one call, CPU time of the calling thread. All meet the same
    disturbances: they take turns, and every second round goes backwards."""
    times = np.empty((len(runs), rounds))
    for number in range(rounds):
        order = range(len(runs))
        for i in order if number % 2 else reversed(order):
            runs[i](groups[0])  # what ran before has used the caches
            began_ns = time.thread_time_ns()
            for rows in groups:
                runs[i](rows)
            times[i, number] = (time.thread_time_ns() - began_ns) / len(groups) / 1e3
    return times
