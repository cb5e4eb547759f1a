# SPDX-License-Identifier: Apache-2.0
"""What only the graph promises; what every index does is in test_index.py."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sparse.answers import assert_damage_is_found, recall
from tests.sparse.key_sets import KINDS, TRAPS, key_set, trap
from tests.support import reference
from tests.support.depth import cases
from vllm_relay.sparse.index.elements import DTYPES
from vllm_relay.sparse.index.flat import FlatIndex
from vllm_relay.sparse.index.graph import HUBS, SPREAD, GraphIndex, GraphOptions
from vllm_relay.sparse.index.query_types import Dipr, TopK

Arrays = dict[str, np.ndarray]
FLOORS = {"random": 0.93, "duplicates": 0.93, "needle": 0.95}
"""Of recall at k = 20 and the default width; 0.97 for the other kinds."""


@cache
def trained_graph(kind: str) -> GraphIndex:
    data = key_set(kind, 3000, 64)
    return GraphIndex().build(data.keys, data.train)


@pytest.mark.parametrize("kind", KINDS)
def test_recall(kind: str) -> None:
    data, index = key_set(kind, 3000, 64), trained_graph(kind)
    truth, _ = reference.search(data.queries, data.keys, TopK(20))
    found = [index.search(row[None], TopK(20)).ids[0] for row in data.queries]
    assert recall(found, truth) >= FLOORS.get(kind, 0.97)
    if kind != "duplicates":  # half a neighbourhood is the same key there
        assert index.default_width <= 300
    in_range, _ = reference.search(data.queries, data.keys, Dipr(beta=3.0))
    found = [index.search(row[None], Dipr(beta=3.0)).ids[0] for row in data.queries]
    assert recall(found, in_range) >= FLOORS.get(kind, 0.97)
    wide = index.search(data.queries, TopK(20, width=3000)).ids
    assert recall(wide, truth) >= 0.99


@pytest.mark.parametrize("kind", KINDS)
def test_most_keys_are_never_looked_at(kind: str) -> None:
    data, index = key_set(kind, 3000, 64), trained_graph(kind)
    for row in data.queries[:5]:
        assert index.search(row[None], TopK(10, width=10)).stats.distances < 1800


@pytest.mark.parametrize("kind", ["random", "rope", "hubs"])
@pytest.mark.parametrize("prefix", [300, 1500, 2900])
def test_recall_under_a_filter(kind: str, prefix: int) -> None:
    data, index = key_set(kind, 3000, 64), trained_graph(kind)
    truth, _ = reference.search(data.queries, data.keys, TopK(20), prefix_len=prefix)
    for group in (1, 8):
        found = [
            ids
            for begin in range(0, 32, group)
            for ids in index.search(
                data.queries[begin : begin + group], TopK(20), prefix_len=prefix
            ).ids
        ]
        assert recall(found, truth) >= 0.9


@settings(max_examples=cases(15))
@given(seed=st.integers(0, 2**32), n=st.integers(1, 1200), d=st.integers(1, 256))
def test_every_key_can_be_reached(seed: int, n: int, d: int) -> None:
    build_and_check(seed, n, d)


@pytest.mark.soak
def test_every_key_can_be_reached_soak() -> None:
    rng = np.random.default_rng(0)
    for seed in range(int(os.environ.get("RELAY_SOAK_INDEX_CASES", "5000")) // 10):
        build_and_check(seed, int(rng.integers(1, 6000)), int(rng.integers(1, 257)))


def build_and_check(seed: int, n: int, d: int) -> None:
    rng = np.random.default_rng(seed)
    keys, queries = trap(
        TRAPS[rng.integers(len(TRAPS))], rng, n, d, int(rng.integers(0, 300)),
        float(rng.choice([1.0, 1e-30, 1e12])), float(rng.choice([1.0, 1e-30, 1e12])),
        DTYPES[rng.integers(3)],
    )  # fmt: skip
    options = None
    if rng.random() < 0.5:
        options = GraphOptions(
            nearest=int(rng.integers(1, 130)), projection_degree=int(rng.integers(0, 40)),
            supply_degree=int(rng.integers(0, 12)), build_width=int(rng.integers(1, 100)),
            pivot_rank=int(rng.integers(1, 50)), queries_per_pivot=int(rng.integers(1, 20)),
            norm_weight=float(rng.choice([0.0, 0.1, 1.0])),
        )  # fmt: skip
    index = GraphIndex(options).build(keys, queries if rng.random() < 0.7 else None)
    assert index.reachable().all()
    index.check()
    rows = index.to_arrays()[1]["graph"]
    for node, row in enumerate(rows):
        neighbours = row[1 : 1 + row[0]]
        assert len(np.unique(neighbours)) == len(neighbours) and node not in neighbours


def test_options_are_chosen_by_how_many_keys_are_the_best_of_a_query() -> None:
    for kind, expected in (("random", SPREAD), ("hubs", HUBS)):
        data = key_set(kind, 2000, 32)
        index = GraphIndex().build(data.keys, data.train)
        assert (index.hub_statistic < 0.3) == (expected is HUBS)
        wanted = GraphIndex(expected).build(data.keys, data.train)
        assert np.array_equal(index.to_arrays()[1]["graph"], wanted.to_arrays()[1]["graph"])


@pytest.mark.parametrize("prefix_len", [None, 2000])
def test_the_ends_of_a_prefix_are_always_looked_at(prefix_len: int | None) -> None:
    keys = np.random.default_rng(0).standard_normal((3000, 64), np.float32)
    index = GraphIndex().build(keys)

    def found(wanted: np.ndarray) -> np.ndarray:
        query = TopK(1, width=1)
        results = [index.search(keys[i][None], query, prefix_len=prefix_len) for i in wanted]
        return np.array([result.ids[0][0] == i for i, result in zip(wanted, results, strict=True)])

    end = prefix_len or 3000
    assert found(np.arange(4)).all() and found(np.arange(end - 16, end)).all()
    assert not found(np.arange(4, end - 16)).all()


def test_no_training_queries_at_all() -> None:
    keys = key_set("random", 200, 16).keys
    index = GraphIndex().build(keys, np.zeros((0, 16), np.float32))
    index.check()
    assert index.search(keys[:3], TopK(200, width=200)).ids[0].size == 200


def too_many_neighbours(arrays: Arrays) -> None:
    arrays["graph"][5, 0] = arrays["graph"].shape[1]


def fewer_than_none(arrays: Arrays) -> None:
    arrays["graph"][5, 0] = -1


def a_neighbour_past_the_end(arrays: Arrays) -> None:
    arrays["graph"][5, 1] = len(arrays["graph"])


def a_neighbour_before_the_first(arrays: Arrays) -> None:
    arrays["graph"][5, 1] = -1


def nobody_leads_to_a_key(arrays: Arrays) -> None:
    graph = arrays["graph"]
    lonely = 7 if arrays["entries"][0] != 7 else 8
    for row in graph:
        others = [key for key in row[1 : 1 + row[0]] if key != lonely]
        row[0] = len(others)
        row[1 : 1 + len(others)] = others


def codes_of_another_key(arrays: Arrays) -> None:
    arrays["codes"][3] = arrays["codes"][4]


def a_key_of_another_code(arrays: Arrays) -> None:
    arrays["keys"][3] = arrays["keys"][4]


def another_step(arrays: Arrays) -> None:
    arrays["step"][0] *= 2


def a_step_of_nothing(arrays: Arrays) -> None:
    arrays["step"][0] = 0


def a_mean_that_is_no_number(arrays: Arrays) -> None:
    arrays["mean"][0] = np.nan


def an_entry_past_the_end(arrays: Arrays) -> None:
    arrays["entries"][0] = len(arrays["graph"])


def no_entries(arrays: Arrays) -> None:
    arrays["entries"] = arrays["entries"][:0]


def rows_too_wide_for_their_lines(arrays: Arrays) -> None:
    arrays["graph"] = arrays["graph"][:, :-1]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (too_many_neighbours, "number of neighbours is out of range"),
        (fewer_than_none, "number of neighbours is out of range"),
        (a_neighbour_past_the_end, "a neighbour is none of its keys"),
        (a_neighbour_before_the_first, "a neighbour is none of its keys"),
        (nobody_leads_to_a_key, "of 120 keys cannot be reached"),
        (codes_of_another_key, "codes do not belong to its keys"),
        (a_key_of_another_code, "codes do not belong to its keys"),
        (another_step, "not true of its keys|do not belong"),
        (a_step_of_nothing, "mean or step"),
        (a_mean_that_is_no_number, "mean or step"),
        (an_entry_past_the_end, "do not fit together"),
        (no_entries, "do not fit together"),
        (rows_too_wide_for_their_lines, "do not fit together"),
    ],
)
def test_damage_is_found(damage: Callable[[Arrays], None], message: str) -> None:
    assert_damage_is_found(GraphIndex().build(key_set("random", 120, 10).keys), damage, message)


def test_more_keys_than_the_width_are_found_where_they_exist() -> None:
    keys = np.random.default_rng(0).standard_normal((3000, 32)).astype(np.float32)
    index = GraphIndex().build(keys, keys[:500])
    (ids,), _, narrow = index.search(keys[:1], TopK(1000, width=10))
    assert len(ids) == 1000
    (ids,), _, usual = index.search(keys[:1], TopK(1000))
    assert len(ids) == 1000 and usual.hops >= 1000 > narrow.hops


@cache
def with_long_keys() -> tuple[np.ndarray, GraphIndex, FlatIndex]:
    """Queries, and indexes of keys of which the first are long."""
    rng = np.random.default_rng(0)
    keys, queries = (rng.standard_normal((n, 64), np.float32) for n in (3000, 4))
    keys[:32] *= 5
    return queries, GraphIndex().build(keys), FlatIndex().build(keys)


@pytest.mark.parametrize(("begin", "prefix_len"), [(2900, None), (50, 200), (2999, None)])
def test_keys_that_do_not_count_take_no_place(begin: int, prefix_len: int | None) -> None:
    queries, index, exact = with_long_keys()
    for query in (TopK(100), Dipr(beta=5.0)):
        found, expected = (
            each.search(queries, query, begin=begin, prefix_len=prefix_len)
            for each in (index, exact)
        )
        for ids, right in zip(found.ids, expected.ids, strict=True):
            assert ids[0] == right[0]
            if isinstance(query, TopK):
                assert len(ids) == len(right) == min(100, (prefix_len or 3000) - begin)


def test_a_build_does_not_depend_on_the_one_before() -> None:
    hubs, random = key_set("hubs", 2000, 32), key_set("random", 500, 32)
    index = GraphIndex().build(hubs.keys, hubs.train).build(random.keys, random.train)
    _, arrays = index.to_arrays()
    _, expected = GraphIndex().build(random.keys, random.train).to_arrays()
    assert all(np.array_equal(arrays[name], expected[name]) for name in expected)
