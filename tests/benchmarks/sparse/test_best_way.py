# SPDX-License-Identifier: Apache-2.0
"""The best way against looking at all of them, with times that are made up."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.sparse import best_way
from benchmarks.sparse.best_way import FULL, Cell, Way
from benchmarks.sparse.heads.corpus import make_head
from benchmarks.sparse.index_timing import Run
from vllm_relay.sparse import CoarseIndex, FlatIndex
from vllm_relay.sparse.index.elements import from_float32

KEYS, TOKENS = 500, 40


def _made_up_us(way: Way) -> float:
    """Rises with the width, and with the range."""
    kind, query = way
    if query is None:
        return 300.0
    size = query.k / KEYS if hasattr(query, "k") else -np.log10(query.alpha)
    return float({"flat": 200, "coarse": 20 + 5 * (query.width or 0)}[kind] + 10 * size)


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    monkeypatch.setattr(Cell, "_few_us", lambda self, way: _made_up_us(way))
    head = make_head("rope", keys=KEYS, train=200, tests=TOKENS, heads=2, reuse=0.6)
    keys, values = from_float32(head.keys, "bfloat16"), from_float32(head.values, "bfloat16")
    indexes = {"flat": FlatIndex().build(keys), "coarse": CoarseIndex(num_lists=30).build(keys)}
    return Cell(head, keys, values, indexes, head.queries)


@pytest.mark.parametrize("max_error", [0.01, 0.1, 0.3])
def test_no_way_that_is_good_enough_is_faster(cell: Cell, max_error: float) -> None:
    measured = cell.measure(max_error, [], 1)
    every = {FULL, *(way for row in cell._rows(max_error) for way in row)}
    good = {way for way in every if cell._error_p99(way) <= max_error}
    fastest = min(map(_made_up_us, good))
    assert min(map(_made_up_us, measured)) == fastest
    assert set(measured) <= good
    assert FULL in measured
    assert all(_made_up_us(way) <= best_way._NEAR * fastest for way in set(measured) - {FULL})


def test_errors_that_were_collected_in_parts_are_those_of_all_queries(cell: Cell) -> None:
    for found in cell.measure(0.1, [], 1).values():
        outputs = np.stack([found.run(rows) for rows in cell._queries])
        errors = np.linalg.norm(outputs - cell._truth, axis=2)
        errors /= np.linalg.norm(cell._truth, axis=2)
        assert found.error_p99 == pytest.approx(float(np.quantile(errors, 0.99)))


def test_every_way_that_is_asked_for_is_measured_and_timed_in_each_round(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_turn(runs: list[Run], groups: np.ndarray, rounds: int) -> np.ndarray:
        assert len(groups) == TOKENS
        return np.arange(1.0, 1 + len(runs) * rounds).reshape(len(runs), rounds)

    monkeypatch.setattr(best_way, "in_turn", in_turn)
    poor = min((way for row in cell._rows(0.3) for way in row), key=_made_up_us)
    found = cell.measure(0.01, [poor, FULL, poor], 3)
    assert poor in found and FULL in found
    for i, each in enumerate(found.values()):
        # the first of four rounds warms up
        assert each.cpu_s == pytest.approx([1e-6 * (4 * i + 1 + number) for number in (1, 2, 3)])
