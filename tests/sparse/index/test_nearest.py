# SPDX-License-Identifier: Apache-2.0
"""The k nearest keys of many queries, which graphs are built from."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sparse.answers import score_ranges
from tests.sparse.kernel_variants import KERNELS
from tests.sparse.key_sets import TRAPS, key_set, trap
from tests.support import reference
from tests.support.depth import cases
from vllm_relay import _C
from vllm_relay.sparse.index.elements import DTYPES, Elements, from_float32
from vllm_relay.sparse.index.key_codes import encode


def nearest(
    keys: Elements, queries: np.ndarray, k: int, *, kernel: str = "auto", threads: int = 1
) -> np.ndarray:
    codes, rows = encode(keys, 1)
    ids = np.full((len(queries), k), -7, np.int32)
    queries = np.ascontiguousarray(queries, np.float32)
    _C.index.nearest(kernel, codes.key_set(keys, rows), queries, codes.outside, ids, threads)
    return ids


def recall_by_score(ids: np.ndarray, scores: np.ndarray, slack: np.ndarray) -> float:
    """Of the k best, equal scores counting for each other."""
    k = ids.shape[1]
    least = -np.sort(-scores, axis=1)[:, k - 1, None]
    return float((np.take_along_axis(scores, ids, 1) >= least - slack[:, None]).mean())


@pytest.mark.parametrize("kind", ["random", "rope", "duplicates", "hubs", "needle", "outliers"])
@pytest.mark.parametrize("size", [(4000, 64), (2500, 128), (3000, 33)])
def test_recall(kind: str, size: tuple[int, int]) -> None:
    data = key_set(kind, *size)
    queries = data.train[:300]
    low, high = score_ranges(queries, data.keys)
    for dtype in DTYPES[::2]:
        keys = from_float32(data.keys, dtype)
        scores = reference.scores_of(queries, keys.to_float32())
        for k in (10, 100):
            ids = nearest(keys, queries, k)
            assert recall_by_score(ids, scores, (high - low).mean(axis=1)) >= 0.985


@settings(max_examples=cases(30))
@given(
    seed=st.integers(0, 2**32),
    n=st.integers(1, 400),
    d=st.integers(1, 256),
    num_queries=st.integers(0, 150),
    k=st.integers(1, 120),
)
def test_what_is_found_is_in_order_and_padded(
    seed: int, n: int, d: int, num_queries: int, k: int
) -> None:
    rng = np.random.default_rng(seed)
    keys, queries = trap(
        TRAPS[rng.integers(len(TRAPS))], rng, n, d, num_queries, dtype=DTYPES[rng.integers(3)]
    )
    ids = nearest(keys, queries, k, kernel=KERNELS[rng.integers(len(KERNELS))])
    low, high = score_ranges(queries, keys.to_float32())
    found = min(k, n)
    assert (ids[:, found:] == -1).all()
    assert (ids[:, :found] >= 0).all() and (ids[:, :found] < n).all()
    for i, row in enumerate(ids[:, :found]):
        assert len(np.unique(row)) == found
        assert (high[i, row[:-1]] >= low[i, row[1:]]).all()
        if n <= k + 12:  # as many as are scored exactly at least: the answer is exact
            left = np.setdiff1d(np.arange(n), row)
            assert not len(left) or low[i, left].max() <= high[i, row].min()


def test_it_does_not_depend_on_threads_or_company() -> None:
    data = key_set("rope", 3000, 64)
    keys = from_float32(data.keys, "bfloat16")
    expected = nearest(keys, data.train[:200], 50)
    for threads in (2, 3, 5):
        assert np.array_equal(nearest(keys, data.train[:200], 50, threads=threads), expected)
    for begin, end in ((0, 1), (63, 64), (64, 67), (190, 200)):
        part = nearest(keys, data.train[begin:end], 50)
        assert np.array_equal(part, expected[begin:end])


@pytest.mark.parametrize("few", [30, 300])
def test_a_sample_that_promises_too_much(few: int) -> None:
    """All of the best keys are in the sample, so that the bound drawn from it lets too few of the
    others through, and the whole is scanned again."""
    n, k = 40_000, 60
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((n, 8)).astype(np.float32)
    direction = np.ones(8, np.float32)
    keys[_C.index.spread_order(n)[:few]] += 10 * direction
    queries = np.stack([direction, -direction, rng.standard_normal(8)]).astype(np.float32)
    ids = nearest(Elements(keys, "float32"), queries, k)
    scores = reference.scores_of(queries, keys)
    assert (ids >= 0).all()
    assert recall_by_score(ids, scores, np.full(3, 1e-3)) >= 0.95


def test_nearly_as_many_as_there_are() -> None:
    """So many that the sample has fewer keys than the bound would be taken from."""
    n = 33_000
    keys = np.random.default_rng(0).standard_normal((n, 4)).astype(np.float32)
    ids = nearest(Elements(keys, "float32"), keys[:2], n - 5)
    assert all(len(np.unique(row)) == n - 5 for row in ids)
    assert (ids >= 0).all()
