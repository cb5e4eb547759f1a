# SPDX-License-Identifier: Apache-2.0
"""The benchmark of plans: what counts as near the best, and all of it at sizes of seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.sparse import bench_planner
from benchmarks.sparse.bench_planner import Measured, excess
from benchmarks.support import machine
from vllm_relay.sparse import Dipr


def _measured(us: float, error: float, width: int = 1) -> Measured:
    way = ("graph", Dipr(alpha=0.1, width=width))
    return Measured(way, lambda rows: rows, error, [us * 1e-6] * 3)


def test_a_choice_that_misses_the_quality_is_infinitely_far_from_the_best() -> None:
    best = _measured(100, 0.009)
    assert excess(best, best, 0.01) == 0
    assert excess(_measured(110, 0.01, 2), best, 0.01) == pytest.approx(0.1)
    assert excess(_measured(50, 0.011, 2), best, 0.01) == float("inf")


def test_queries_of_the_test_are_not_those_of_the_sample() -> None:
    head = bench_planner.make("rope", 200, 12)
    sample, test = bench_planner.sample_queries(head), bench_planner.test_queries(head)
    assert len(sample) + len(test) == 12 and 0 < len(sample) < len(test)
    assert not any(np.array_equal(a, b) for a in sample for b in test)


def test_all_of_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "measure_peak", lambda threads=1: {})
    path = tmp_path / "result.json"
    monkeypatch.setattr("sys.argv", ["bench_planner", "--smoke", "--json", str(path)])
    bench_planner.main()
    result: dict[str, Any] = json.loads(path.read_text())
    cells, shares = (table["rows"] for table in result["tables"])
    assert len(cells) == 2 * 2 * 2 and result["goals"] == []
    for cell in cells:
        assert cell["best error"] <= cell["target"]
        assert cell["planner error"] <= cell["target"]
        if cell["planner"] == cell["best"]:
            assert cell["planner over"] == 0
        if cell["rules error"] > cell["target"]:
            assert cell["rules over"] == float("inf")
    assert [share["cells"] for share in shares] == [4] * 6
