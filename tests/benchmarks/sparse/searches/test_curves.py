# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence

import numpy as np
import pytest

from benchmarks.sparse.heads.corpus import make_head
from benchmarks.sparse.searches import curves, exact
from benchmarks.sparse.searches.contenders import Contender, Reference, Search
from benchmarks.sparse.searches.curves import at_recall
from benchmarks.sparse.searches.own_searches import group_cost


class FirstKeys(Contender):
    """Scores the first `effort` keys only."""

    name, efforts = "first keys", (50, 100, 200, 400, 800)
    effort_from_k = True
    _distances = 0

    def build(self, keys: np.ndarray, train_queries: np.ndarray) -> None:
        self._keys, self.calls = keys, 0

    def search(self, k: int, effort: int) -> Search:
        def run(queries: np.ndarray) -> Sequence[np.ndarray]:
            self.calls += 1
            self._distances += len(queries) * min(effort, len(self._keys))
            return exact.top_k(queries, self._keys[:effort], k)

        return run


class FirstKeysAtOnce(FirstKeys):
    whole_batch = True


@pytest.fixture
def head():
    return make_head("flat", keys=400, train=10, tests=25, head_size=16)


def sweep(contender: Contender, head, k: int) -> list[curves.Point]:
    contender.build(head.keys, head.train_queries)
    queries = head.queries[:, 0]
    return curves.sweep(contender, queries, head.keys, exact.top_k(queries, head.keys, k))


def test_a_sweep_ends_at_the_first_effort_that_finds_everything(head) -> None:
    points = sweep(FirstKeys(), head, 10)
    assert [point.effort for point in points] == [50, 100, 200, 400]
    assert [point.distances for point in points] == [50, 100, 200, 400]
    recalls = [point.recall for point in points]
    assert recalls == sorted(recalls)
    assert recalls[0] == pytest.approx(50 / 400, abs=0.08)
    assert recalls[-1] == 1


def test_efforts_below_k_are_k(head) -> None:
    assert [point.effort for point in sweep(FirstKeys(), head, 100)] == [100, 200, 400]


@pytest.mark.parametrize(("contender", "calls"), [(FirstKeys(), 25), (FirstKeysAtOnce(), 1)])
def test_queries_go_one_by_one_or_all_at_once(contender: FirstKeys, calls: int, head) -> None:
    points = sweep(contender, head, 10)
    assert contender.calls == calls * len(points)


def test_every_round_times_every_point(head) -> None:
    found = [sweep(FirstKeys(), head, 10), sweep(Reference(), head, 10)]
    curves.time_curves(found, head.queries[:, 0], 10, rounds=3)
    for point in [*found[0], *found[1]]:
        assert len(point.cpu_s) == len(point.wall_s) == 3
        assert min(point.wall_s) > 0


def test_the_oracle_needs_no_interpolation(head) -> None:
    points = sweep(Reference(), head, 10)
    curves.time_curves([points], head.queries[:, 0], 10, rounds=2)
    assert curves.times_at_recall(points, 0.95) == points[0].cpu_s
    assert curves.distances_at_recall(points, 0.95) == 400


def test_times_at_a_recall_lie_between_those_of_the_efforts_around_it(head) -> None:
    points = sweep(FirstKeys(), head, 10)
    for number, point in enumerate(points):
        point.cpu_s = [10.0 * number, 20.0 * number]
    low, high = points[1].recall, points[2].recall
    middle = curves.times_at_recall(points, (low + high) / 2)
    assert middle == pytest.approx([15, 30])
    assert curves.distances_at_recall(points, (low + high) / 2) == pytest.approx(150)


@pytest.mark.parametrize(
    ("recalls", "values", "wanted", "expected"),
    [
        ([0.8, 0.9, 1.0], [1, 2, 4], 0.95, 3),
        ([0.8, 0.9, 1.0], [1, 2, 4], 0.9, 2),
        ([0.8, 0.9, 1.0], [1, 2, 4], 0.8, 1),
        ([0.8, 0.9, 1.0], [1, 2, 4], 0.79, None),
        ([0.8, 0.9], [1, 2], 0.95, None),
        # an effort that loses recall against a lower one says nothing
        ([0.8, 0.9, 0.85, 1.0], [1, 2, 3, 4], 0.95, 3),
        ([0.9, 0.9, 1.0], [1, 2, 4], 0.95, 2.5),
        ([], [], 0.95, None),
    ],
)
def test_at_recall(
    recalls: list[float], values: list[float], wanted: float, expected: float | None
) -> None:
    assert at_recall(recalls, values, wanted) == (
        None if expected is None else pytest.approx(expected)
    )


def test_the_lowest_effort_is_a_bound_where_it_has_more_recall() -> None:
    assert at_recall([0.8, 0.9], [1, 2], 0.7, or_bound=True) == 1
    assert at_recall([0.8, 0.9], [1, 2], 0.85, or_bound=True) == pytest.approx(1.5)
    assert at_recall([0.8, 0.9], [1, 2], 0.95, or_bound=True) is None


def test_cost_of_a_group() -> None:
    rows = [
        {
            "recall alone": 0.9,
            "least recall in group": 0.92,
            "cpu us alone": 10,
            "cpu us of group": 20,
        },
        {
            "recall alone": 1.0,
            "least recall in group": 0.98,
            "cpu us alone": 30,
            "cpu us of group": 80,
        },
    ]
    assert group_cost(rows, 0.95) == pytest.approx(50 / 20)
    assert group_cost(rows[1:], 0.95) is None  # the group never has the recall of one head
    assert group_cost([{**rows[0], "least recall in group": 0.99}], 0.9) == pytest.approx(2)
