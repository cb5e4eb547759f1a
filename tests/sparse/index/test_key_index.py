# SPDX-License-Identifier: Apache-2.0
"""What every key index promises (`KeyIndex`), asked of each kind."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.sparse.answers import assert_exact, assert_same, assert_well_formed, recall
from tests.sparse.key_sets import KINDS, TRAPS, key_set, trap
from tests.support import reference
from tests.support.depth import cases
from vllm_relay.sparse.index.blocks import BlockIndex
from vllm_relay.sparse.index.coarse import CoarseIndex
from vllm_relay.sparse.index.compiled_index import CompiledIndex
from vllm_relay.sparse.index.elements import DTYPES, Elements, from_float32
from vllm_relay.sparse.index.flat import FlatIndex
from vllm_relay.sparse.index.graph import GraphIndex
from vllm_relay.sparse.index.key_index import IndexDamagedError, SearchResult
from vllm_relay.sparse.index.query_types import Dipr, QueryType, TopK

INDEXES: dict[str, type[CompiledIndex]] = {
    "flat": FlatIndex,
    "blocks": BlockIndex,
    "coarse": CoarseIndex,
    "graph": GraphIndex,
}
each_index = pytest.mark.parametrize("index_class", INDEXES.values(), ids=INDEXES)
OTHERS = (BlockIndex, CoarseIndex, GraphIndex)
SIZE = (700, 48)


@pytest.fixture(scope="module")
def built() -> dict[type[CompiledIndex], CompiledIndex]:
    """Over the same keys, with training queries; not to be changed."""
    data = key_set("rope", *SIZE)
    return {kind: kind().build(data.keys, data.train) for kind in INDEXES.values()}


def arrays_of(index: CompiledIndex) -> dict[str, np.ndarray]:
    return index.to_arrays()[1]


def assert_same_index(a: CompiledIndex, b: CompiledIndex) -> None:
    (settings_a, arrays_a), (settings_b, arrays_b) = a.to_arrays(), b.to_arrays()
    assert settings_a == settings_b
    assert arrays_a.keys() == arrays_b.keys()
    for name, array in arrays_a.items():
        assert array.dtype == arrays_b[name].dtype
        assert np.array_equal(array, arrays_b[name]), name


@each_index
@pytest.mark.parametrize("kind", KINDS)
def test_good_indexes_pass_their_check(index_class: type[CompiledIndex], kind: str) -> None:
    data = key_set(kind, 300, 20)
    index_class().build(data.keys, data.train).check()
    index_class().build(data.keys).check()


@each_index
@pytest.mark.parametrize("n", [1, 2, 3, 15, 16, 17, 40])
def test_few_keys_are_all_found(index_class: type[CompiledIndex], n: int) -> None:
    """With so few keys, whatever an index promises is exact: they are all scored."""
    rng = np.random.default_rng(n)
    for name in TRAPS:
        keys, queries = trap(name, rng, n, 33, 3)
        index = index_class().build(keys, queries)
        index.check()
        for query in (TopK(1000, width=1000), Dipr(beta=1e6, width=1000)):
            result = index.search(queries, query)
            assert_exact(result, queries, keys.to_float32(), query)
            assert all(len(ids) == n for ids in result.ids) or name == "norm outliers"


@settings(max_examples=cases(10))
@given(seed=st.integers(0, 2**32), n=st.integers(1, 900), d=st.integers(1, 256))
def test_the_widest_search_finds_what_reading_every_key_does(seed: int, n: int, d: int) -> None:
    """Of as many keys as are scored exactly, k + k / 4, the codes choose: k is all here."""
    rng = np.random.default_rng(seed)
    keys, queries = trap(
        TRAPS[rng.integers(len(TRAPS))], rng, n, d, int(rng.integers(1, 20)),
        float(rng.choice([1.0, 1e-30, 1e4, 1e12])), float(rng.choice([1.0, 1e-30, 1e4])),
        DTYPES[rng.integers(3)],
    )  # fmt: skip
    prefix = None if rng.random() < 0.5 else int(rng.integers(0, n + 1))
    for index_class in OTHERS:
        index = index_class().build(keys, queries)
        index.check()
        query = TopK(n, width=n)
        if index_class is GraphIndex and prefix is not None:
            # what is reached through keys past the prefix may stay unseen
            result = index.search(queries, query, prefix_len=prefix)
            assert_well_formed(result, len(queries), prefix)
            prefix = None
        result = index.search(queries, query, prefix_len=prefix)
        assert_exact(result, queries, keys.to_float32(), query, prefix_len=prefix)


@each_index
@pytest.mark.parametrize("kind", KINDS)
def test_no_answer_lies_past_the_prefix(index_class: type[CompiledIndex], kind: str) -> None:
    data = key_set(kind, 600, 24)
    index = index_class().build(data.keys, data.train)
    for prefix in (0, 1, 15, 16, 17, 299, 599, 600):
        for query in (TopK(50), Dipr(beta=5.0), TopK(50, width=600)):
            for group in (1, 4, 20):
                queries = data.queries[:group]
                result = index.search(queries, query, prefix_len=prefix)
                assert_well_formed(result, group, prefix)
                for i, row in enumerate(reference.scores_of(queries, data.keys)):
                    assert np.allclose(result.scores[i], row[result.ids[i]], rtol=1e-3, atol=1e-2)
                    # of the lists that are read none may have a key of the prefix
                    all_read = index_class is not CoarseIndex or query.width == 600
                    assert len(result.ids[i]) or prefix == 0 or not all_read


@each_index
@pytest.mark.parametrize("kind", ["rope", "outliers"])
def test_no_answer_lies_before_the_beginning(index_class: type[CompiledIndex], kind: str) -> None:
    data = key_set(kind, 600, 24)
    index = index_class().build(data.keys, data.train)
    for begin in (0, 1, 15, 16, 17, 299, 599, 600, 10**6):
        for prefix in (None, 16, 17, 300):
            end = 600 if prefix is None else prefix
            for query in (TopK(50), Dipr(beta=5.0), TopK(600, width=600)):
                for group in (1, 5):
                    queries = data.queries[:group]
                    result = index.search(queries, query, begin=begin, prefix_len=prefix)
                    assert_well_formed(result, group, end)
                    assert all((ids >= begin).all() for ids in result.ids)
                    if begin < end and (query.width or index_class is FlatIndex):
                        part = [ids - begin for ids in result.ids]
                        moved = SearchResult(part, result.scores, result.stats)
                        assert all(len(ids) for ids in part)
                        if index_class is not GraphIndex:
                            assert_exact(moved, queries, data.keys[begin:end], query)


@each_index
@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_are_kept_as_they_are(index_class: type[CompiledIndex], dtype: str) -> None:
    keys = from_float32(key_set("random", 200, 17).keys, dtype)
    index = index_class().build(keys)
    assert index.keys.dtype == dtype
    assert np.array_equal(index.keys.data, keys.data)
    assert (index.num_keys, index.head_size) == (200, 17)


@each_index
def test_scores_are_those_of_the_stored_keys(index_class: type[CompiledIndex]) -> None:
    data = key_set("random", 400, 64)
    keys = torch.from_numpy(data.keys).to(torch.bfloat16)
    result = index_class().build(keys).search(data.queries, TopK(5, width=400))
    exact = data.queries.astype(np.float64) @ keys.double().numpy().T
    for i, (ids, scores) in enumerate(zip(result.ids, result.scores, strict=True)):
        assert np.allclose(scores, exact[i, ids], rtol=1e-5, atol=1e-4)


@each_index
@pytest.mark.parametrize("trained", [False, True])
def test_the_same_arguments_give_the_same_index(
    index_class: type[CompiledIndex], trained: bool
) -> None:
    for kind in ("rope", "duplicates", "outliers"):
        data = key_set(kind, 1500, 40)
        train = data.train if trained else None
        first = index_class().build(data.keys, train, seed=3, threads=1)
        for threads in (1, 2, 3, 5):
            again = index_class().build(data.keys, train, seed=3, threads=threads)
            assert_same_index(first, again)


def test_the_seed_matters() -> None:
    data = key_set("random", 1500, 40)
    a, b = (CoarseIndex().build(data.keys, seed=seed) for seed in (1, 2))
    assert not np.array_equal(arrays_of(a)["centres"], arrays_of(b)["centres"])
    a, b = (GraphIndex().build(data.keys, data.train, seed=seed) for seed in (1, 2))
    assert not np.array_equal(arrays_of(a)["graph"], arrays_of(b)["graph"])


@each_index
def test_threads_search_one_index_at_once(
    index_class: type[CompiledIndex], built: dict[Any, CompiledIndex]
) -> None:
    index, queries = built[index_class], key_set("rope", *SIZE).queries
    jobs: list[tuple[np.ndarray, QueryType, int | None]] = [
        (queries[i : i + group], query, prefix)
        for i in range(0, 24, 3)
        for group in (1, 3, 8)
        for query in (TopK(20), Dipr(beta=4.0))
        for prefix in (None, 333)
    ]

    def search(job: tuple[np.ndarray, QueryType, int | None]) -> Any:
        return index.search(job[0], job[1], prefix_len=job[2])

    expected = [search(job) for job in jobs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            for result, want in zip(pool.map(search, jobs), expected, strict=True):
                assert_same(result, want)


@each_index
def test_what_a_thread_searched_before_does_not_matter(index_class: type[CompiledIndex]) -> None:
    """A thread's scratch serves every index, and its marks are one byte: after so many searches of
    a small index, marks of the last search of a large one come round again."""
    small_set, large_set = (key_set("random", n, 24, seed=n) for n in (40, 600))
    small, large = (index_class().build(each.keys) for each in (small_set, large_set))
    for group in (1, 5):
        queries, few = large_set.queries[:group], small_set.queries[:group]
        all_keys = TopK(600, width=600)
        expected, expected_few = large.search(queries, all_keys), small.search(few, TopK(5))
        for gap in range(250, 260):
            assert_same(large.search(queries, all_keys), expected)
            for _ in range(gap):
                assert_same(small.search(few, TopK(5)), expected_few)


@each_index
@pytest.mark.parametrize("mmap", [True, False])
def test_a_saved_index_answers_alike(
    index_class: type[CompiledIndex], mmap: bool, built: dict[Any, CompiledIndex], tmp_path: Path
) -> None:
    index, data = built[index_class], key_set("rope", *SIZE)
    index.save(tmp_path / "index")
    loaded = index_class.load(tmp_path / "index", mmap=mmap)
    assert_same_index(index, loaded)
    loaded.check()
    for query in (TopK(20), Dipr(beta=4.0), TopK(3, width=2)):
        assert_same(index.search(data.queries, query), loaded.search(data.queries, query))
    for other in INDEXES.values():
        if other is not index_class:
            with pytest.raises(IndexDamagedError, match=f"expected a {other.kind} key index"):
                other.load(tmp_path / "index", mmap=mmap)


@each_index
def test_an_index_without_keys_says_so(index_class: type[CompiledIndex]) -> None:
    for use in (
        lambda index: index.search(np.zeros((1, 4), np.float32), TopK(1)),
        lambda index: index.num_keys,
        lambda index: index.check(),
    ):
        with pytest.raises(RuntimeError, match="holds no keys: build it or load one"):
            use(index_class())


@each_index
def test_no_queries_no_answers(
    index_class: type[CompiledIndex], built: dict[Any, CompiledIndex]
) -> None:
    result = built[index_class].search(np.zeros((0, SIZE[1]), np.float32), TopK(3))
    assert result.ids == result.scores == []


@each_index
def test_costs_are_counted(
    index_class: type[CompiledIndex], built: dict[Any, CompiledIndex]
) -> None:
    queries = key_set("rope", *SIZE).queries[:4]
    index = built[index_class]
    stats = index.search(queries, TopK(5)).stats
    representatives = getattr(index, "num_lists", 0) + getattr(index, "num_blocks", 0)
    assert 0 < stats.distances <= SIZE[0] + representatives
    assert stats.hops > 0
    assert stats.bytes > stats.distances * 48
    if index_class is FlatIndex:
        assert stats.distances == SIZE[0]


GOOD = np.ones((3, SIZE[1]), np.float32)
BAD_ROWS: list[tuple[Any, str]] = [
    (np.full((3, SIZE[1]), np.nan), r"NaN or infinity at \[0, 0\]"),
    (np.full((3, SIZE[1]), np.inf, np.float16), "NaN or infinity"),
    (torch.full((3, SIZE[1]), -torch.inf, dtype=torch.bfloat16), "NaN or infinity"),
    (np.full((3, SIZE[1]), 1e300), "NaN or infinity"),
    (GOOD.astype(np.complex64), "dtype complex64"),
    (GOOD.astype(np.int64), "dtype int64"),
    (torch.ones(3, SIZE[1], dtype=torch.int32), "dtype int32"),
    (GOOD.astype(bool), "dtype bool"),
    ([["a"] * SIZE[1]], "dtype"),
    ([[1.0], [1.0, 2.0]], "inhomogeneous"),
    (None, "dtype object"),
    (GOOD[0], "shape"),
    (GOOD[None], "shape"),
    (np.float32(1), "shape"),
]


@each_index
@pytest.mark.parametrize(("rows", "message"), BAD_ROWS)
def test_unusable_rows_are_refused_by_name(
    index_class: type[CompiledIndex], rows: Any, message: str, built: dict[Any, CompiledIndex]
) -> None:
    with np.errstate(over="ignore"):
        with pytest.raises(ValueError, match=f"^keys: .*{message}"):
            index_class().build(rows)
        with pytest.raises(ValueError, match=f"^queries: .*{message}"):
            built[index_class].search(rows, TopK(1))
        if index_class is not FlatIndex and rows is not None:  # flat does not look at them
            with pytest.raises(ValueError, match=f"^train_queries: .*{message}"):
                index_class().build(GOOD, rows)


@each_index
def test_unusable_sizes_are_refused(
    index_class: type[CompiledIndex], built: dict[Any, CompiledIndex]
) -> None:
    for shape, message in (((0, 4), "there are none"), ((3, 0), "head_size 0"), ((3, 257), "257")):
        with pytest.raises(ValueError, match=f"^keys: .*{message}"):
            index_class().build(np.zeros(shape, np.float32))
    with pytest.raises(ValueError, match="^keys: magnitudes up to 2e[+]38"):
        index_class().build(np.full((3, 4), -2e38, np.float32))
    with pytest.raises(ValueError, match="^queries: "):
        built[index_class].search(np.ones((1, 3), np.float32), TopK(1))
    for threads in (0, -1, 1.0, True, "2"):
        with pytest.raises(ValueError, match="^threads is "):
            index_class().build(GOOD, threads=threads)


@each_index
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"query": 5}, "query is 5"),
        ({"query": None}, "query is None"),
        ({"prefix_len": -1}, "prefix_len is -1"),
        ({"prefix_len": 701}, "prefix_len is 701, expected 0 to 700"),
        ({"prefix_len": 3.0}, "prefix_len is 3.0"),
        ({"prefix_len": True}, "prefix_len is True"),
        ({"begin": -1}, "begin is -1"),
        ({"begin": 2.0}, "begin is 2.0"),
        ({"window_max": [1.0, 2.0]}, r"window_max: shape \[2\], expected \[3\]"),
        ({"window_max": 1.0}, "window_max: shape"),
        ({"window_max": [np.nan] * 3}, "window_max: NaN or infinity"),
        ({"window_max": [np.inf] * 3}, "window_max: NaN or infinity"),
        ({"window_max": ["a"] * 3}, "window_max: "),
        ({"window_max": [1j] * 3}, "window_max: "),
        ({"window_max": [[1], [1, 2], [3]]}, "window_max: "),
    ],
)
def test_unusable_arguments_are_refused_by_name(
    index_class: type[CompiledIndex],
    arguments: dict[str, Any],
    message: str,
    built: dict[Any, CompiledIndex],
) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        built[index_class].search(GOOD, **{"query": Dipr(beta=1.0), **arguments})


@each_index
def test_the_largest_numbers_are_taken(
    index_class: type[CompiledIndex], built: dict[Any, CompiledIndex]
) -> None:
    most = 2**31 - 1
    for query in (TopK(most, width=most), Dipr(beta=1e300, width=most), Dipr(alpha=1e-300)):
        result = built[index_class].search(GOOD, query)
        assert_well_formed(result, 3, SIZE[0])
        if query.width:
            assert [len(ids) for ids in result.ids] == [SIZE[0]] * 3


@each_index
def test_rows_need_not_lie_in_a_row(
    index_class: type[CompiledIndex], built: dict[Any, CompiledIndex]
) -> None:
    data = key_set("rope", *SIZE)
    wide = np.zeros((SIZE[0], 2 * SIZE[1]), np.float32)
    wide[:, ::2] = data.keys
    strided = index_class().build(wide[:, ::2], data.train)
    assert_same_index(strided, built[index_class])
    expected = built[index_class].search(data.queries, TopK(5))
    for queries in (data.queries.T.copy().T, data.queries.tolist(), torch.tensor(data.queries)):
        assert_same(built[index_class].search(queries, TopK(5)), expected)


def flipped(array: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    array = np.ascontiguousarray(array).copy()
    if array.size and array.dtype != object:
        raw = array.reshape(-1).view(np.uint8)
        raw[rng.integers(len(raw))] ^= 1 << rng.integers(8)
    return array


MISFITS: list[Callable[[np.ndarray, np.random.Generator], np.ndarray]] = [
    lambda a, rng: a[:-1],
    lambda a, rng: np.concatenate([a, a[:1]]),
    lambda a, rng: a[..., None],
    lambda a, rng: a.reshape(-1),
    lambda a, rng: a[:0],
    lambda a, rng: a.astype(np.float64),
    lambda a, rng: a.astype(a.dtype.newbyteorder()),
    lambda a, rng: a.astype(np.int32) if a.dtype != np.int32 else a.astype(np.int64),
    lambda a, rng: a.astype(object),
    lambda a, rng: np.zeros((3, 3), a.dtype),
    lambda a, rng: rng.permutation(a.reshape(-1)).reshape(a.shape),
    lambda a, rng: rng.integers(-(2**31), 2**31, a.shape).astype(a.dtype),
    lambda a, rng: np.zeros_like(a),
    lambda a, rng: np.zeros_like(a) - np.ones(1, a.dtype),
    flipped,
    flipped,
]
BAD_SETTINGS = [None, "x", -1, 0, 1e30, float("nan"), [], "float64", "bfloat16", 10**20]


@cache
def small_parts(index_class: type[CompiledIndex]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    data = key_set("outliers", 90, 10)
    return index_class().build(data.keys, data.train).to_arrays()


@each_index
@settings(max_examples=cases(75))
@given(seed=st.integers(0, 2**32))
@example(seed=27)  # a slot of a graph that no edge uses
def test_whatever_is_restored_is_refused_or_searched(
    index_class: type[CompiledIndex], seed: int
) -> None:
    """Damage is refused by `from_arrays` or `check`, or it does no harm."""
    rng = np.random.default_rng(seed)
    data = key_set("outliers", 90, 10)
    settings_, arrays = (dict(part) for part in small_parts(index_class))
    for _ in range(rng.integers(1, 3)):
        name = str(rng.choice([*arrays, "settings"]))
        if name == "settings":
            key = str(rng.choice(list(settings_)))
            if rng.random() < 0.2:
                del settings_[key]
            else:
                settings_[key] = BAD_SETTINGS[rng.integers(len(BAD_SETTINGS))]
        elif rng.random() < 0.05:
            del arrays[name]
        else:
            with np.errstate(all="ignore"):
                arrays[name] = MISFITS[rng.integers(len(MISFITS))](arrays[name], rng)
    try:
        index = index_class.from_arrays(settings_, arrays)
        index.check()
    except IndexDamagedError:
        return
    for query in (TopK(20), TopK(90, width=90), Dipr(beta=3.0)):
        for prefix in (None, 33):
            result = index.search(data.queries, query, prefix_len=prefix)
            assert_well_formed(result, len(data.queries), prefix or 90)
    if index_class is FlatIndex:
        values = index.keys.to_float32()
        result = index.search(data.queries, TopK(20))
        assert_exact(result, data.queries, values, TopK(20))


@each_index
def test_each_array_is_needed_and_looked_at(
    index_class: type[CompiledIndex], built: dict[Any, CompiledIndex]
) -> None:
    settings_, arrays = built[index_class].to_arrays()
    for name, array in arrays.items():
        without = {other: value for other, value in arrays.items() if other != name}
        with pytest.raises(IndexDamagedError):
            index_class.from_arrays(settings_, without)
        if name in ("centres", "outside"):  # nothing to compare them with; there are none
            continue
        changed = array.copy()
        raw = changed.reshape(-1).view(np.uint8)
        raw[min(7, len(raw) - 1)] ^= 0x40  # a high byte
        with pytest.raises(IndexDamagedError):
            index_class.from_arrays(settings_, arrays | {name: changed}).check()
    for name in ("longest", "longest_error"):
        with pytest.raises(IndexDamagedError):
            index_class.from_arrays(settings_ | {name: settings_[name] / 2}, arrays).check()


@each_index
def test_keys_outside_are_looked_at(index_class: type[CompiledIndex]) -> None:
    data = key_set("outliers", 90, 10)
    settings_, arrays = index_class().build(data.keys).to_arrays()
    outside = arrays["outside"]
    assert len(outside) == 5
    for changed in (outside[:-1], outside[:0], outside[::-1].copy(), (outside + 1) % 90):
        with pytest.raises(IndexDamagedError):
            index_class.from_arrays(
                settings_, arrays | {"outside": changed.astype(np.int32)}
            ).check()


@each_index
def test_keys_that_are_no_numbers_are_looked_at(index_class: type[CompiledIndex]) -> None:
    settings_, arrays = index_class().build(key_set("random", 50, 8).keys).to_arrays()
    keys = arrays["keys"].copy()
    keys[7, 3] = np.nan
    with pytest.raises(IndexDamagedError, match=r"NaN or infinity at \[7, 3\]"):
        index_class.from_arrays(settings_, arrays | {"keys": keys}).check()


def test_recall_does_not_collapse_when_queries_come_in_groups() -> None:
    data = key_set("rope", 3000, 64)
    truth, _ = reference.search(data.queries, data.keys, TopK(20))
    for index_class in OTHERS:
        index = index_class().build(data.keys, data.train)
        query = TopK(20, width=10 if index_class is CoarseIndex else 40)
        alone = [index.search(row[None], query).ids[0] for row in data.queries]
        for group in (2, 5, 16, 17, 32):
            together = [
                ids
                for begin in range(0, 32, group)
                for ids in index.search(data.queries[begin : begin + group], query).ids
            ]
            assert recall(together, truth) >= recall(alone, truth) - 0.005


def test_elements_stay_elements() -> None:
    keys = Elements(np.ones((4, 2), np.float32), "float32")
    assert FlatIndex().build(keys).keys.data is keys.data
