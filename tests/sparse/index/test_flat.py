# SPDX-License-Identifier: Apache-2.0
"""The flat index is exact: always the answer that reading every key would give."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sparse.answers import assert_exact, assert_same
from tests.sparse.key_sets import MAGNITUDES, TRAPS, trap
from tests.support.depth import cases
from vllm_relay.sparse.index.elements import DTYPES
from vllm_relay.sparse.index.flat import FlatIndex
from vllm_relay.sparse.index.query_types import Dipr, QueryType, TopK

NUM_KEYS = st.one_of(
    st.integers(1, 70),
    st.integers(2, 130).flatmap(lambda blocks: st.integers(16 * blocks - 1, 16 * blocks + 1)),
)
HEAD_SIZES = st.one_of(st.sampled_from([1, 2, 63, 64, 65, 100, 127, 128, 255, 256]),
                       st.integers(1, 256))  # fmt: skip


def random_query(
    rng: np.random.Generator, scores: np.ndarray
) -> tuple[QueryType, np.ndarray | None]:
    """A query type, and what the window has where the query type looks at it."""
    n = scores.shape[1]
    if rng.random() < 0.5:
        return TopK(int(rng.choice([1, 2, 10, n // 2 + 1, max(1, n), n + 5]))), None
    spread = float(np.ptp(scores, axis=1).mean()) if n else 1.0
    beta = spread * float(rng.choice([0.0, 0.1, 0.5, 1.0, 3.0]))
    if rng.random() < 0.5:
        return Dipr(beta=beta), None
    window = scores.max(axis=1, initial=-1.0) + spread * rng.uniform(-2, 2, len(scores))
    window[rng.random(len(scores)) < 0.2] = -np.inf
    return Dipr(beta=beta), window.astype(np.float32)


def search_and_compare(seed: int, n: int, d: int, g: int) -> None:
    rng = np.random.default_rng(seed)
    keys, queries = trap(
        TRAPS[rng.integers(len(TRAPS))], rng, n, d, g, float(rng.choice(MAGNITUDES)),
        float(rng.choice(MAGNITUDES)), DTYPES[rng.integers(3)],
    )  # fmt: skip
    values = keys.to_float32()
    prefix = None if rng.random() < 0.5 else int(rng.integers(0, n + 1))
    index = FlatIndex().build(keys)
    for _ in range(3):
        scores = queries.astype(np.float64) @ values[:prefix].astype(np.float64).T
        query, window = random_query(rng, scores)
        result = index.search(queries, query, prefix_len=prefix, window_max=window)
        assert_exact(result, queries, values, query, prefix_len=prefix, window_max=window)


@settings(max_examples=cases(63))
@given(seed=st.integers(0, 2**32), n=NUM_KEYS, d=HEAD_SIZES, g=st.integers(1, 20))
def test_answers_are_those_of_reading_every_key(seed: int, n: int, d: int, g: int) -> None:
    search_and_compare(seed, n, d, g)


@pytest.mark.soak
def test_answers_are_those_of_reading_every_key_soak() -> None:
    rng = np.random.default_rng(0)
    for seed in range(int(os.environ.get("RELAY_SOAK_INDEX_CASES", "5000"))):
        n, d, g = int(rng.integers(1, 5000)), int(rng.integers(1, 257)), int(rng.integers(1, 21))
        search_and_compare(seed, n, d, g)


@pytest.mark.parametrize("name", TRAPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_trap(name: str, dtype: str) -> None:
    rng = np.random.default_rng(1)
    keys, queries = trap(name, rng, 1500, 96, 5, dtype=dtype)
    values = keys.to_float32()
    index = FlatIndex().build(keys)
    for query in (TopK(30), Dipr(beta=0.0), Dipr(beta=3.0), Dipr(alpha=0.01)):
        assert_exact(index.search(queries, query), queries, values, query)


@pytest.mark.parametrize(
    ("key_magnitude", "query_magnitude"),
    [
        (key_magnitude, query_magnitude)
        for key_magnitude in (1e-38, *MAGNITUDES, 1e30)
        for query_magnitude in (1e-38, 1e-25, *MAGNITUDES, 1e30)
        if key_magnitude * query_magnitude < 1e36  # larger scores overflow
    ],
)
def test_magnitudes(key_magnitude: float, query_magnitude: float) -> None:
    rng = np.random.default_rng(2)
    keys, queries = trap("random", rng, 333, 40, 3, key_magnitude, query_magnitude)
    index = FlatIndex().build(keys)
    for query in (TopK(20), Dipr(beta=key_magnitude * query_magnitude * 5)):
        assert_exact(index.search(queries, query), queries, keys.to_float32(), query)


def test_scores_that_overflow_have_an_order() -> None:
    rng = np.random.default_rng(3)
    keys = (rng.standard_normal((2000, 64)) * 1e30).astype(np.float32)
    queries = (rng.standard_normal((3, 64)) * 1e30).astype(np.float32)
    result = FlatIndex().build(keys).search(queries, TopK(2000))
    exact = queries.astype(np.float64) @ keys.T.astype(np.float64)
    for i, (ids, scores) in enumerate(zip(result.ids, result.scores, strict=True)):
        assert np.array_equal(scores > 0, exact[i, ids] > 0)
        positive = np.flatnonzero(exact[i] > 0)
        assert np.array_equal(ids[: len(positive)], positive)


def test_keys_of_which_each_is_an_outlier_somewhere() -> None:
    keys = (1000 * np.eye(40)).astype(np.float32)
    queries = np.random.default_rng(4).standard_normal((4, 40)).astype(np.float32)
    query = TopK(7)
    assert_exact(FlatIndex().build(keys).search(queries, query), queries, keys, query)


@pytest.mark.parametrize("places", [[0], [15, 16], [17, 31, 48], [199], [3, 150, 151, 198]])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_keys_outside_are_found_and_left_out_by_their_score(places: list[int], sign: float) -> None:
    rng = np.random.default_rng(5)
    keys = rng.standard_normal((200, 32)).astype(np.float32)
    keys[places] *= 1e5
    queries = np.stack([sign * keys[places].sum(axis=0), rng.standard_normal(32)])
    queries = (queries / np.abs(queries).max(axis=1, keepdims=True)).astype(np.float32)
    index = FlatIndex().build(keys)
    assert index._codes.outside.tolist() == places
    for prefix in (None, *places, *(place + 1 for place in places)):
        for query in (TopK(1), TopK(9), TopK(200), Dipr(beta=3.0)):
            result = index.search(queries, query, prefix_len=prefix)
            assert_exact(result, queries, keys, query, prefix_len=prefix)


def test_a_group_finds_what_its_queries_find_alone() -> None:
    rng = np.random.default_rng(6)
    keys, queries = trap("near duplicates", rng, 3000, 72, 20)
    index = FlatIndex().build(keys)
    for query in (TopK(40), Dipr(beta=2.0)):
        group = index.search(queries, query)
        for i, row in enumerate(queries):
            alone = index.search(row[None], query)
            assert np.array_equal(group.ids[i], alone.ids[0])
            assert np.array_equal(group.scores[i], alone.scores[0])


def test_equal_scores_come_in_the_order_of_their_keys() -> None:
    keys = np.ones((5000, 16), np.float32)
    index = FlatIndex().build(keys)
    for queries in (np.ones((1, 16), np.float32), np.zeros((1, 16), np.float32)):
        assert index.search(queries, TopK(70)).ids[0].tolist() == list(range(70))
        assert index.search(queries, Dipr(beta=0.0)).ids[0].tolist() == list(range(5000))


def test_a_range_reaches_down_from_the_window() -> None:
    keys = np.arange(10, dtype=np.float32)[:, None]
    one = np.ones((1, 1), np.float32)
    index = FlatIndex().build(keys)

    def found(window_max: float | None) -> list[int]:
        window = None if window_max is None else [window_max]
        return index.search(one, Dipr(beta=3.5), window_max=window).ids[0].tolist()

    assert found(None) == found(-np.inf) == found(-1e30) == found(9.0) == [9, 8, 7, 6]
    assert found(10.0) == [9, 8, 7]
    assert found(12.25) == [9]
    assert found(13.0) == found(1e30) == []


def test_ranges_far_beyond_the_scores() -> None:
    """2e9 steps of the codes and more lie between the window and the keys."""
    rng = np.random.default_rng(7)
    keys = rng.standard_normal((500, 64)).astype(np.float32)
    queries = (1e-7 * rng.standard_normal((4, 64))).astype(np.float32)
    index = FlatIndex().build(keys)
    for beta, expected in ((25.0, 500), (19.0, 0), (1e300, 500)):
        result = index.search(queries, Dipr(beta=beta), window_max=[20.0] * 4)
        assert [len(ids) for ids in result.ids] == [expected] * 4


def test_width_changes_nothing() -> None:
    rng = np.random.default_rng(8)
    keys, queries = trap("random", rng, 400, 24, 3)
    index = FlatIndex().build(keys)
    expected = index.search(queries, TopK(10))
    assert_same(index.search(queries, TopK(10, width=1)), expected)


@given(
    values=st.lists(st.sampled_from([-2.0, -1.0, -0.0, 0.0, 1.0, 2.0]), min_size=1, max_size=300),
    query=st.sampled_from([-1.0, 1.0, 3e38, -0.0]),
    k=st.integers(1, 300),
)
def test_answers_with_ties_are_in_order(values: list[float], query: float, k: int) -> None:
    keys = np.array(values, np.float32)[:, None]
    found = FlatIndex().build(keys).search(np.array([[query]], np.float32), TopK(k))
    with np.errstate(over="ignore"):
        scores = keys[:, 0] * np.float32(query)
    order = np.lexsort((np.arange(len(keys)), -scores))[:k]
    assert found.ids[0].tolist() == order.tolist()
