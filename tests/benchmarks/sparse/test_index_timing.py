# SPDX-License-Identifier: Apache-2.0
"""What is timed, and how often, by a clock that the searches move."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.sparse import index_timing
from benchmarks.sparse.index_timing import (
    Run,
    full_run,
    in_turn,
    search_run,
    times_us,
    with_times,
)
from vllm_relay.sparse import CoarseIndex, Dipr, FlatIndex
from vllm_relay.sparse.index.elements import from_float32
from vllm_relay.sparse.plan.head_profile import MeasuredSearch, profile_head
from vllm_relay.sparse.plan.index_measure import exact_attention, measure_full, measure_index

KEYS, GROUP, SIZE, TOKENS = 600, 2, 32, 24
MAX_ERROR = 0.3


class Clock:
    """Stands still but for the runs it makes."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.calls: list[str] = []

    def run(self, name: str, *times_us: float) -> Run:
        """Takes these times in turn."""
        left = list(times_us)

        def call(rows: np.ndarray) -> np.ndarray:
            self.calls.append(name)
            self.now_ns += round(1e3 * left[0])
            left.append(left.pop(0))
            return rows

        return call

    def thread_time_ns(self) -> int:
        return self.now_ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(index_timing, "time", clock)
    return clock


def test_all_take_turns_and_every_second_round_goes_backwards(clock: Clock) -> None:
    runs = [clock.run("a", 10), clock.run("b", 30)]
    times = in_turn(runs, np.zeros((3, 1, 4), np.float32), 3)
    assert times.tolist() == [[10, 10, 10], [30, 30, 30]]
    # in each round one call that is not timed, then one for each token
    assert "".join(clock.calls) == "bbbbaaaaaaaabbbbbbbbaaaa"


def test_the_least_disturbed_round_counts(clock: Clock) -> None:
    groups = np.zeros((8, 1, 4), np.float32)
    # a neighbour disturbs one call in 20, and a round has 8 that are timed
    disturbed = clock.run("a", *[20] * 4, 500, *[20] * 15)
    assert times_us([disturbed], groups) == [20]


def test_slow_ones_are_timed_less_often_but_with_the_same_queries(clock: Clock) -> None:
    groups = np.zeros((9, 1, 4), np.float32)
    found = times_us([clock.run(*each) for each in (("a", 100), ("b", 120), ("c", 900))], groups)
    assert found == [100, 120, 900]
    assert clock.calls.count("a") == clock.calls.count("b") == 5 * clock.calls.count("c")
    assert times_us([], groups) == []


def test_queries_that_take_longer_than_others_count_for_all(clock: Clock) -> None:
    # a search whose first queries are quick, and one that always takes as long
    uneven = clock.run("uneven", *[10] * 9, *[300] * 9)
    assert times_us([uneven, clock.run("even", 100)], np.zeros((17, 1, 4), np.float32)) == [
        pytest.approx((8 * 10 + 9 * 300) / 17),
        pytest.approx(100),
    ]


def _measured() -> tuple[list[MeasuredSearch], list[MeasuredSearch]]:
    """Searches of a prefix without and with their times."""
    rng = np.random.default_rng(0)
    keys, values = rng.standard_normal((2, KEYS, SIZE), np.float32)
    queries = 1.5 * rng.standard_normal((TOKENS, GROUP, SIZE), np.float32)
    keys, values = from_float32(keys, "bfloat16"), from_float32(values, "bfloat16")
    seen = keys.rows(0, 400), values.rows(0, 400)
    exact = exact_attention(*seen, queries)
    answers = profile_head(seen[0], queries, seen[1], query_types=(Dipr(alpha=1e-3),)).answers
    indexes = [FlatIndex().build(keys), CoarseIndex(num_lists=20).build(keys)]
    plain = [measure_full(400, GROUP)]
    for index in indexes:
        plain += measure_index(index, values, exact, answers, prefix_len=400)
    plain.append(replace(plain[-1], error_p99_upper=2 * MAX_ERROR))
    timed = with_times(plain, indexes, keys, values, queries, prefix_len=400, max_error=MAX_ERROR)
    return plain, timed


def test_searches_that_are_good_enough_get_a_time() -> None:
    plain, timed = _measured()
    assert {each.kind for each in plain} == {"full", "flat", "coarse"}
    assert [replace(each, time_us=None) for each in timed] == plain
    for each in timed:
        assert each.error_bound is not None
        assert (each.time_us is not None) == (each.error_bound <= MAX_ERROR)
        assert each.time_us is None or each.time_us > 0
    assert timed[-1].time_us is None and timed[-2].time_us is not None


def test_what_is_timed_is_attention_over_what_is_found() -> None:
    rng = np.random.default_rng(0)
    keys, values = rng.standard_normal((2, KEYS, SIZE), np.float32)
    rows = rng.standard_normal((GROUP, SIZE), np.float32)
    stored = from_float32(keys, "float32"), from_float32(values, "float32")
    weights = np.exp(rows @ keys[:400].T / SIZE**0.5)
    expected = weights @ values[:400] / weights.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(full_run(*stored, 400)(rows), expected, atol=1e-5)
    index = FlatIndex().build(stored[0])
    found = search_run(index, stored[1], Dipr(alpha=1e-6), 400)(rows)
    np.testing.assert_allclose(found, expected, atol=1e-3)
