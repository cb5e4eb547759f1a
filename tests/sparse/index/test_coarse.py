# SPDX-License-Identifier: Apache-2.0
"""What only the inverted file promises; what every index does is in test_index.py."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.sparse.answers import assert_damage_is_found, assert_exact, assert_same, recall
from tests.sparse.key_sets import KINDS, key_set
from tests.support import reference
from vllm_relay.sparse.index.coarse import CoarseIndex
from vllm_relay.sparse.index.query_types import Dipr, TopK

Arrays = dict[str, np.ndarray]


@pytest.mark.parametrize("kind", KINDS)
def test_the_default_width_finds_most(kind: str) -> None:
    """Measured with 150 training queries for a recall of 0.95 at k = 100."""
    data = key_set(kind, 3000, 64)
    index = CoarseIndex().build(data.keys, data.train)
    truth, _ = reference.search(data.queries, data.keys, TopK(100))
    found = [index.search(row[None], TopK(100)).ids[0] for row in data.queries]
    assert recall(found, truth) >= 0.9
    assert 1 <= index.default_width <= index.num_lists


@pytest.mark.parametrize("kind", KINDS)
def test_more_lists_find_more(kind: str) -> None:
    data = key_set(kind, 3000, 64)
    index = CoarseIndex().build(data.keys)
    truth, _ = reference.search(data.queries, data.keys, TopK(20))
    widths = (1, 10, 40, index.num_lists, 10 * index.num_lists)
    results = [index.search(data.queries[:1], TopK(20, width=width)) for width in widths]
    costs = [result.stats.distances for result in results]
    assert costs == sorted(costs) and costs[0] < 500
    assert costs[-1] == costs[-2] == index.num_lists + 3000 - len(index._codes.outside)
    assert_same(results[-1], results[-2])
    widest = index.search(data.queries, TopK(20, width=index.num_lists)).ids
    assert recall(widest, truth) >= 0.99


def test_a_range_over_all_lists_is_that_of_reading_every_key() -> None:
    data = key_set("rope", 1000, 64)
    index = CoarseIndex().build(data.keys)
    truth, _ = reference.search(data.queries, data.keys, Dipr(beta=6.0))
    for ids, true in zip(
        index.search(data.queries, Dipr(beta=6.0, width=1000)).ids, truth, strict=True
    ):
        assert len(np.setdiff1d(ids, true)) == 0
        assert len(ids) >= 0.98 * len(true)


@pytest.mark.parametrize(("wanted", "most"), [(1, 1), (7, 7), (500, 500), (2000, 600)])
def test_the_number_of_lists(wanted: int, most: int) -> None:
    data = key_set("random", 600, 16)
    index = CoarseIndex(wanted).build(data.keys)
    index.check()
    assert 0.5 * most <= index.num_lists <= most
    result = index.search(data.queries, TopK(600, width=600))
    assert_exact(result, data.queries, data.keys, TopK(600))


@pytest.mark.parametrize("wanted", [0, -3])
def test_no_lists_are_refused(wanted: int) -> None:
    with pytest.raises(ValueError, match=f"^num_lists is {wanted}, expected at least 1"):
        CoarseIndex(wanted)


def test_lists_hold_neighbours() -> None:
    rng = np.random.default_rng(0)
    centres = 20 * rng.standard_normal((10, 32))
    of = rng.integers(0, 10, 2000)
    keys = (centres[of] + rng.standard_normal((2000, 32))).astype(np.float32)
    arrays = CoarseIndex(40).build(keys).to_arrays()[1]
    mixed = 0
    for start, count in zip(arrays["starts"], arrays["counts"], strict=True):
        members = of[arrays["ids"][16 * start : 16 * start + count]]
        mixed += int((members != members[0]).sum())
    assert mixed < 100


def a_shorter_list(arrays: Arrays) -> None:
    arrays["counts"][np.flatnonzero(arrays["counts"] % 16 > 1)[0]] -= 1


def a_longer_list(arrays: Arrays) -> None:
    arrays["counts"][np.flatnonzero(arrays["counts"] % 16 > 1)[0]] += 1


def keys_out_of_order(arrays: Arrays) -> None:
    first = 16 * arrays["starts"][np.flatnonzero(arrays["counts"] > 1)[0]]
    arrays["ids"][[first, first + 1]] = arrays["ids"][[first + 1, first]]
    lanes = arrays["blocks"][first // 16].reshape(-1, 16, 4)
    lanes[:, [0, 1]] = lanes[:, [1, 0]]


def a_key_twice(arrays: Arrays) -> None:
    arrays["ids"][0] = arrays["ids"][16 * arrays["starts"][1]]


def a_key_missing(arrays: Arrays) -> None:
    arrays["ids"][0] = -1


def codes_of_another_key(arrays: Arrays) -> None:
    arrays["blocks"][0] ^= 1


def a_key_past_the_end(arrays: Arrays) -> None:
    arrays["ids"][0] = 90


def starts_that_overlap(arrays: Arrays) -> None:
    arrays["starts"][1] = 0


def an_empty_list(arrays: Arrays) -> None:
    arrays["counts"][0] = 0


def a_negative_list(arrays: Arrays) -> None:
    arrays["counts"][0] = -(2**31)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (a_shorter_list, "do not hold every key once"),
        (a_longer_list, "do not hold every key once"),
        (keys_out_of_order, "not in the order of its keys"),
        (a_key_twice, "do not hold every key once"),
        (a_key_missing, "do not hold every key once"),
        (codes_of_another_key, "codes do not belong to its keys"),
        (a_key_past_the_end, "do not fit together"),
        (starts_that_overlap, "do not fit together"),
        (an_empty_list, "do not fit together"),
        (a_negative_list, "do not fit together"),
    ],
)
def test_damage_is_found(damage: Callable[[Arrays], None], message: str) -> None:
    assert_damage_is_found(CoarseIndex(7).build(key_set("random", 90, 10).keys), damage, message)


def test_a_prefix_takes_no_width_for_lists_that_have_none_of_its_keys() -> None:
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((4000, 32)).astype(np.float32)
    index = CoarseIndex().build(keys)
    for begin, prefix_len in ((0, 1), (0, 5), (3999, 4000), (2000, 2003)):
        (ids,), _, _ = index.search(keys[:1], TopK(10, width=1), begin=begin, prefix_len=prefix_len)
        assert len(ids) > 0
        assert ((ids >= begin) & (ids < prefix_len)).all()


@pytest.mark.parametrize(("begin", "prefix_len"), [(0, None), (100, 900)])
def test_lists_are_read_until_they_hold_enough(begin: int, prefix_len: int | None) -> None:
    data = key_set("random", 1000, 32)
    index = CoarseIndex().build(data.keys)
    for k in (100, 2000):
        query = TopK(k, width=1)
        result = index.search(data.queries[:3], query, begin=begin, prefix_len=prefix_len)
        assert [len(ids) for ids in result.ids] == 3 * [min(k, (prefix_len or 1000) - begin)]
