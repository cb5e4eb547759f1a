# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_relay.sparse.index.default_width import smallest_width, split_queries


@given(count=st.integers(0, 5000), seed=st.integers(0, 2**32))
def test_queries_are_split_in_two(count: int, seed: int) -> None:
    held, rest = split_queries(count, seed)
    assert len(held) == min(128, count // 8)
    assert np.array_equal(np.sort(np.concatenate([held, rest])), np.arange(count))
    assert (np.diff(held) > 0).all() and (np.diff(rest) > 0).all()
    assert np.array_equal(split_queries(count, seed)[0], held)


def test_other_seeds_hold_out_other_queries() -> None:
    assert not np.array_equal(split_queries(1000, 0)[0], split_queries(1000, 1)[0])


@pytest.mark.parametrize("needed", [1, 9, 10, 11, 63, 64, 65, 500, 999, 1000])
@pytest.mark.parametrize("low", [1, 10])
def test_the_width_is_the_smallest_that_reaches_the_recall(needed: int, low: int) -> None:
    truth = [np.arange(100), np.arange(100)]
    asked = []

    def search(width: int) -> list[np.ndarray]:
        asked.append(width)
        return [np.arange(100 if width >= needed else 90)] * 2

    width = smallest_width(search, truth, low=low, high=1000)
    least = max(needed, low)
    assert least <= width <= least + max(1, least // 15)
    assert all(low <= each <= 1000 for each in asked)
    assert len(asked) < 20


def test_the_widest_where_none_reaches_it() -> None:
    assert smallest_width(lambda _: [np.zeros(0)], [np.arange(3)], low=2, high=77) == 77
    assert smallest_width(lambda _: [np.zeros(0)], [np.arange(3)], low=50, high=20) == 20


def test_recall_is_the_mean_over_queries() -> None:
    truth = [np.arange(10), np.arange(10)]

    def search(width: int) -> list[np.ndarray]:
        return [np.arange(10), np.arange(width)]

    assert smallest_width(search, truth, low=1, high=10, target_recall=0.75) == 5


def test_no_truth_is_no_recall() -> None:
    empty = np.zeros(0, np.int32)
    assert smallest_width(lambda _: [empty], [empty], low=1, high=4) == 4
