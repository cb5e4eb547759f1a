# SPDX-License-Identifier: Apache-2.0
"""What searches of built indexes take, timed in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from vllm_relay.sparse.index.compiled_index import CompiledIndex
from vllm_relay.sparse.index.elements import Elements
from vllm_relay.sparse.index.query_types import QueryType
from vllm_relay.sparse.index.sparse_layer import SparseLayer, attend

Run = Callable[[np.ndarray], np.ndarray]
"""Attention [group, value_size] of the queries [group, d] of one token."""


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
