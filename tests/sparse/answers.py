# SPDX-License-Identifier: Apache-2.0
"""Whether what a search found is the answer, as far as sums in float32 can tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.support import reference
from vllm_relay.sparse.index.key_index import IndexDamagedError, KeyIndex, SearchResult
from vllm_relay.sparse.index.query_types import QueryType, TopK

# a sum of 256 products: 16 in each lane, 4 across lanes, up to 15 past the last full lane
FLOAT_ROUNDING = 36 * 2.0**-24
SMALLEST_FLOAT = 2.0**-149


def score_ranges(queries: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[g, n], [g, n]: where the float32 scores of keys lie."""
    scores = reference.scores_of(queries, keys)
    sizes = reference.scores_of(np.abs(queries), np.abs(keys))
    error = FLOAT_ROUNDING * sizes + 2 * keys.shape[1] * SMALLEST_FLOAT
    return scores - error, scores + error


def assert_well_formed(result: SearchResult, num_queries: int, num_keys: int) -> None:
    assert len(result.ids) == len(result.scores) == num_queries
    for ids, scores in zip(result.ids, result.scores, strict=True):
        assert ids.dtype == np.int32 and scores.dtype == np.float32
        assert ids.shape == scores.shape
        assert len(np.unique(ids)) == len(ids)
        assert not len(ids) or (ids.min() >= 0 and ids.max() < num_keys)
        order = np.lexsort((ids, -scores))
        assert np.array_equal(order, np.arange(len(ids))), "not best first, or ties not by id"


def assert_exact(
    result: SearchResult,
    queries: np.ndarray,
    keys: np.ndarray,
    query: QueryType,
    *,
    prefix_len: int | None = None,
    window_max: Any = None,
) -> None:
    """Every key that float32 scores must choose is there, and none that they cannot."""
    keys = keys[:prefix_len]
    n, d = keys.shape
    assert_well_formed(result, len(queries), n)
    low, high = score_ranges(queries, keys)
    for i, (ids, scores) in enumerate(zip(result.ids, result.scores, strict=True)):
        assert (scores >= low[i, ids]).all() and (scores <= high[i, ids]).all(), f"query {i}"
        if isinstance(query, TopK):
            assert len(ids) == min(query.k, n)
            certain, possible = _of_the_best(low[i], high[i], query.k)
        else:
            window = -np.inf if window_max is None else float(np.float32(window_max[i]))
            certain, possible = _in_range(low[i], high[i], query.range(d), window)
        missing = np.setdiff1d(np.flatnonzero(certain), ids)
        assert not len(missing), f"query {i}: keys {missing[:10]} are missing"
        wrong = ids[~possible[ids]]
        assert not len(wrong), f"query {i}: keys {wrong[:10]} are no answer"


def _of_the_best(low: np.ndarray, high: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    n = len(low)
    maybe_better = n - np.searchsorted(np.sort(high), low, side="left") - 1  # without itself
    surely_better = n - np.searchsorted(np.sort(low), high, side="right")
    return maybe_better < k, surely_better < k


def _in_range(
    low: np.ndarray, high: np.ndarray, reach: float, window: float
) -> tuple[np.ndarray, np.ndarray]:
    best_low, best_high = (
        max(low.max(initial=-np.inf), window),
        max(high.max(initial=-np.inf), window),
    )
    if not np.isfinite(best_high):
        return np.zeros(len(low), bool), np.zeros(len(low), bool)
    rounding = 2.0**-23 * (abs(best_low) + abs(best_high) + reach) + SMALLEST_FLOAT
    return low > best_high - reach + rounding, high >= best_low - reach - rounding


def recall(found: Sequence[np.ndarray], truth: Sequence[np.ndarray]) -> float:
    parts = [
        len(np.intersect1d(got, true)) / max(1, len(true))
        for got, true in zip(found, truth, strict=True)
    ]
    return float(np.mean(parts))


def assert_same(a: SearchResult, b: SearchResult) -> None:
    """Bit for bit."""
    for x, y in zip(a.ids, b.ids, strict=True):
        assert np.array_equal(x, y)
    for x, y in zip(a.scores, b.scores, strict=True):
        assert np.array_equal(x, y)


def assert_damage_is_found(
    index: KeyIndex, damage: Callable[[dict[str, np.ndarray]], None], message: str
) -> None:
    """`damage` changes the arrays of an index, which is whole before."""
    settings, arrays = index.to_arrays()
    arrays = {name: array.copy() for name, array in arrays.items()}
    type(index).from_arrays(settings, arrays).check()
    damage(arrays)
    with pytest.raises(IndexDamagedError, match=message):
        type(index).from_arrays(settings, arrays).check()
