# SPDX-License-Identifier: Apache-2.0
"""The bound of the attention weight that a search left out: never below the truth, and low enough
where the query says how low."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.sparse.answers import assert_same
from tests.sparse.key_sets import KINDS, TRAPS, key_set, trap
from tests.support import reference
from tests.support.depth import cases
from vllm_relay.sparse import BlockIndex, CoarseIndex, Dipr, FlatIndex, GraphIndex, TopK
from vllm_relay.sparse.index.compiled_index import CompiledIndex
from vllm_relay.sparse.index.elements import DTYPES, from_float32
from vllm_relay.sparse.index.query_types import QueryType

INDEXES = (FlatIndex, BlockIndex, CoarseIndex, GraphIndex)
QUERIES: tuple[QueryType, ...] = (
    TopK(1),
    TopK(30),
    TopK(5, scale=0.02),
    Dipr(alpha=0.1),
    Dipr(beta=0.0, scale=0.3),
)
LIMITS = (1.0, 0.05)
ROUNDING = 1e-12  # of the oracle, which takes a sum from 1


def check_bound(
    index: CompiledIndex,
    queries: np.ndarray,
    query: QueryType,
    begin: int = 0,
    prefix_len: int | None = None,
) -> np.ndarray:
    """By how much the bound lies above the truth, for each query."""
    result = index.search(queries, query, begin=begin, prefix_len=prefix_len)
    bound = result.stats.dropped_mass
    assert bound is not None and bound.dtype == np.float32 and bound.shape == (len(queries),)
    assert query.max_dropped_mass is not None
    assert ((bound >= 0) & (bound <= np.float32(query.max_dropped_mass))).all()
    keys = index.keys.to_float32()[begin:prefix_len]
    if len(keys) == 0:
        assert not bound.any() and not any(map(len, result.ids))
        return bound.astype(np.float64)
    places = [ids - begin for ids in result.ids]
    truth = reference.dropped_mass(queries, keys, places, scale=query.scale)
    assert (bound >= truth - ROUNDING).all()
    return bound - truth


@pytest.mark.parametrize("index_class", INDEXES, ids=lambda index_class: index_class.kind)
@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_lies_above_the_truth(kind: str, index_class: type[CompiledIndex]) -> None:
    for number, (n, d) in enumerate([(1, 16), (63, 33), (1000, 100)]):
        data = key_set(kind, n, d)
        keys = from_float32(np.clip(data.keys, -6e4, 6e4), DTYPES[number])  # as float16 can
        index = index_class().build(keys, data.train, threads=1)
        for begin, prefix_len in ((0, None), (n // 7, n - n // 5), (n - 1, n), (n, None)):
            for query in QUERIES:
                for limit in LIMITS:
                    limited = replace(query, max_dropped_mass=limit)
                    over = check_bound(index, data.queries[:8], limited, begin, prefix_len)
                    # else 1 would do
                    assert limit < 1 or np.median(over) < 0.1


@settings(max_examples=cases(38))
# keys without codes, whose scores floats cannot tell apart
@example(seed=274, n=300, d=217, group=20, limit=1.0, magnitude=1.0)
@given(
    seed=st.integers(0, 2**32),
    n=st.integers(1, 300),
    d=st.integers(1, 256),
    group=st.integers(1, 20),
    limit=st.one_of(st.sampled_from([0.0, *LIMITS]), st.floats(0, 1)),
    magnitude=st.sampled_from([0.01, 0.3, 1.0, 4.0]),
)
def test_the_bound_of_keys_made_to_mislead(
    seed: int, n: int, d: int, group: int, limit: float, magnitude: float
) -> None:
    rng = np.random.default_rng(seed)
    keys, queries = trap(
        TRAPS[rng.integers(len(TRAPS))], rng, n, d, group,
        query_magnitude=magnitude, dtype=DTYPES[rng.integers(3)],
    )  # fmt: skip
    index = INDEXES[rng.integers(len(INDEXES))]().build(keys, queries, threads=1)
    begin, prefix_len = sorted(rng.integers(0, n + 1, 2).tolist())
    for query in QUERIES:
        limited = replace(query, max_dropped_mass=limit)
        check_bound(index, queries, limited, begin, prefix_len)


@pytest.mark.parametrize("index_class", INDEXES, ids=lambda index_class: index_class.kind)
def test_without_a_limit_the_bound_adds_nothing(index_class: type[CompiledIndex]) -> None:
    data = key_set("flat", 500, 64)
    index = index_class().build(data.keys, data.train, threads=1)
    flat = FlatIndex().build(data.keys)
    for query in QUERIES:
        told = index.search(data.queries, replace(query, max_dropped_mass=1.0), begin=4)
        expected = flat.search(data.queries, query, begin=4)
        assert_same(told._replace(stats=expected.stats), expected)
