# SPDX-License-Identifier: Apache-2.0
"""Finds, with training queries, how wide an approximate index has to search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vllm_relay.sparse.index.compiled_index import CompiledIndex, check_train_queries
from vllm_relay.sparse.index.query_types import TopK

TARGET_K = 100
HELD_OUT_RECALL = 0.975
"""Of the best keys of held-out training queries, on average: those of queries that come later are
found to 0.95. Held-out ones are few and of the middle of a context, and the width is the first that
does for them. With 0.95 of theirs, graphs found 0.927 to 0.968 for later queries of five heads
`rope` of benchmarks/sparse with 16,384 keys and three with 100,000."""


def split_queries(num_queries: int, seed: int, most: int = 128) -> tuple[np.ndarray, np.ndarray]:
    """(held out, the rest): ascending positions; an eighth at most is held out."""
    held = np.random.default_rng(seed).choice(
        num_queries, min(most, num_queries // 8), replace=False
    )
    held.sort()
    return held, np.setdiff1d(np.arange(num_queries), held, assume_unique=True)


def smallest_width(
    search: Callable[[int], Sequence[np.ndarray]],
    truth: Sequence[np.ndarray],
    *,
    low: int,
    high: int,
    target_recall: float = HELD_OUT_RECALL,
) -> int:
    """The smallest width in [low, high] at which `search(width)` finds `target_recall` of the
    true ids on average, to about 6%; `high` if none does."""

    def reaches(width: int) -> bool:
        found = search(width)
        pairs = zip(found, truth, strict=True)
        recalls = [len(np.intersect1d(got, true)) / max(1, len(true)) for got, true in pairs]
        return float(np.mean(recalls)) >= target_recall

    low, high = min(low, high), high
    width = low
    while width < high and not reaches(width):
        low, width = width, min(high, 2 * width)
    while width - low > max(1, width // 16):
        middle = (low + width) // 2
        if reaches(middle):
            width = middle
        else:
            low = middle
    return width


def learned_width(index: CompiledIndex, train_queries: Any, seed: int, widest: int) -> int:
    """`smallest_width` for the `TARGET_K` best keys that `index` finds at its widest, of training
    queries [m, d] that are held out; the index's default if these are too few."""
    queries = check_train_queries(train_queries, index.head_size)
    held_out = queries[split_queries(len(queries), seed)[0]]
    if not len(held_out):
        return index.default_width
    truth = index.search(held_out, TopK(min(TARGET_K, index.num_keys), width=widest)).ids
    return width_to_find(index, held_out, truth, low=1, high=widest)


def width_to_find(
    index: CompiledIndex,
    queries: np.ndarray,
    truth: Sequence[np.ndarray],
    *,
    low: int,
    high: int,
) -> int:
    """`smallest_width` for the best keys of queries, as many of each: at least one."""
    k = len(truth[0])

    def search(width: int) -> list[np.ndarray]:
        return [index.search(query[None], TopK(k, width=width)).ids[0] for query in queries]

    return smallest_width(search, truth, low=low, high=high)
