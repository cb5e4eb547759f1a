# SPDX-License-Identifier: Apache-2.0
"""Every kernel gives the same integers.

Codes, products of codes, candidates and the edges of a graph are whole numbers or float sums in a
fixed order, so these are equal bit for bit. Exact scores are not: a fused multiply-add rounds once
where the portable kernel rounds twice. They may differ in their last bits, and with them the order
of keys that score the same but for those.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from tests.sparse.answers import FLOAT_ROUNDING, assert_exact
from tests.sparse.kernel_variants import KERNELS, kernel
from tests.sparse.key_sets import KINDS, TRAPS, key_set, trap
from vllm_relay import _C
from vllm_relay.sparse.index.blocks import BlockIndex
from vllm_relay.sparse.index.coarse import CoarseIndex
from vllm_relay.sparse.index.compiled_index import CompiledIndex
from vllm_relay.sparse.index.elements import DTYPES, Elements, from_float32
from vllm_relay.sparse.index.flat import FlatIndex
from vllm_relay.sparse.index.graph import GraphIndex
from vllm_relay.sparse.index.key_codes import encode, split_codes
from vllm_relay.sparse.index.query_types import Dipr, QueryType, TopK

INDEXES = (FlatIndex, BlockIndex, CoarseIndex, GraphIndex)
FAST = [name for name in KERNELS if name != "portable"]
each_fast_kernel = pytest.mark.parametrize("fast", FAST)


def with_kernel(name: str, index: CompiledIndex) -> CompiledIndex:
    """The same arrays, searched by that kernel."""
    with kernel(name):
        return type(index).from_arrays(*index.to_arrays())


def whole_numbers(rng: np.random.Generator, n: int, d: int) -> np.ndarray:
    """Small enough for sums that do not round, so that even exact scores are equal."""
    return rng.integers(-8, 9, (n, d)).astype(np.float32)


def test_the_portable_kernel_is_always_there() -> None:
    assert KERNELS[-1] == "portable"
    for name in ("abacus", ""):
        with pytest.raises(ValueError, match="cannot run here"):
            _C.index.FlatSearcher(name, *flat_parts(np.ones((2, 2), np.float32)))


def flat_parts(keys: np.ndarray) -> tuple[object, np.ndarray, np.ndarray]:
    elements = Elements(keys, "float32")
    codes, rows = encode(elements, 1)
    upper, lower = split_codes(rows)
    return codes.key_set(elements, upper), codes.outside, lower


@each_fast_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [1, 15, 16, 17, 63, 64, 65, 128, 200, 256])
def test_codes_are_equal(fast: str, dtype: str, d: int) -> None:
    for name in TRAPS:
        keys, _ = trap(name, np.random.default_rng(d), 333, d, 1, dtype=dtype)
        codes, rows = encode(keys, 1)
        with kernel("portable"):
            portable_codes, portable_rows = encode(keys, 1)
        assert np.array_equal(rows, portable_rows)
        assert codes.longest == portable_codes.longest
        assert codes.longest_error == portable_codes.longest_error
        assert np.array_equal(codes.outside, portable_codes.outside)


@pytest.mark.parametrize("d", [1, 16, 63, 64, 65, 128, 129, 192, 193, 256])
@pytest.mark.parametrize("index_class", INDEXES)
def test_answers_over_whole_numbers_are_equal(d: int, index_class: type[CompiledIndex]) -> None:
    rng = np.random.default_rng(d)
    keys, queries = whole_numbers(rng, 1003, d), whole_numbers(rng, 20, d)
    built = index_class().build(from_float32(keys, DTYPES[d % 3]), queries)
    indexes = {name: with_kernel(name, built) for name in KERNELS}
    for query in (TopK(1), TopK(37), TopK(500, width=30), Dipr(beta=float(d)), Dipr(beta=0.0)):
        for group in (1, 2, 4, 5, 20):
            for prefix in (None, 501, 17):
                found = {
                    name: index.search(queries[:group], query, prefix_len=prefix)
                    for name, index in indexes.items()
                }
                b = found["portable"]
                for name in FAST:
                    a = found[name]
                    assert a.stats == b.stats, name
                    for x, y in zip((*a.ids, *a.scores), (*b.ids, *b.scores), strict=True):
                        assert np.array_equal(x, y), name


@cache
def trained_index(index_class: type[CompiledIndex], kind: str) -> CompiledIndex:
    data = key_set(kind, 1500, 72)
    return index_class().build(data.keys, data.train)


@each_fast_kernel
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("index_class", INDEXES)
def test_searches_take_the_same_way(fast: str, kind: str, index_class: type[CompiledIndex]) -> None:
    """Which keys are looked at is decided by codes; only the last bits of scores may differ."""
    data = key_set(kind, 1500, 72)
    built = trained_index(index_class, kind)
    indexes = [with_kernel(name, built) for name in (fast, "portable")]
    for query in (TopK(1500, width=60), Dipr(beta=4.0)):
        for group in (1, 7):
            a, b = (index.search(data.queries[:group], query) for index in indexes)
            assert a.stats == b.stats
            if isinstance(query, TopK):
                for i, row in enumerate(data.queries[:group]):
                    x, y = np.argsort(a.ids[i]), np.argsort(b.ids[i])
                    assert np.array_equal(a.ids[i][x], b.ids[i][y])
                    sizes = np.abs(data.keys[a.ids[i][x]]) @ np.abs(row)
                    off = np.abs(a.scores[i][x] - b.scores[i][y])
                    assert (off <= 2 * FLOAT_ROUNDING * sizes).all()


@each_fast_kernel
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trained", [False, True])
def test_graphs_are_equal(fast: str, kind: str, trained: bool) -> None:
    a, b = (graph_of_whole_numbers(name, kind, trained).to_arrays() for name in (fast, "portable"))
    assert a[0] == b[0]
    for name, array in a[1].items():
        assert np.array_equal(array, b[1][name]), name


@cache
def graph_of_whole_numbers(name: str, kind: str, trained: bool) -> CompiledIndex:
    """Built by that kernel: of other numbers, near ties among the nearest could fall either way."""
    data = key_set(kind, 1200, 40)
    scale = 8 / np.abs(data.keys).max(axis=0).clip(1e-9)
    keys, train = np.round(data.keys * scale), np.round(4 * data.train)
    with kernel(name):
        return GraphIndex().build(keys, train if trained else None, threads=1)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_kernel_is_exact(name: str, dtype: str) -> None:
    queries_asked: tuple[QueryType, ...] = (TopK(25), Dipr(beta=2.0))
    for case, trap_name in enumerate(TRAPS):
        rng = np.random.default_rng(case)
        n, d = int(rng.integers(1, 900)), int(rng.integers(1, 257))
        keys, queries = trap(trap_name, rng, n, d, 7, dtype=dtype)
        with kernel(name):
            index = FlatIndex().build(keys)
        for query in queries_asked:
            assert_exact(index.search(queries, query), queries, keys.to_float32(), query)
