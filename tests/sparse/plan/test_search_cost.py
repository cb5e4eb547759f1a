# SPDX-License-Identifier: Apache-2.0
"""Costs: between the sizes that were measured, in files, and measured themselves."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tests.sparse.planned_heads import COSTS
from vllm_relay import tune
from vllm_relay.arguments import CommandLineError
from vllm_relay.sparse.plan import cost_calibration
from vllm_relay.sparse.plan.search_cost import (
    KINDS,
    SHIPPED_COSTS,
    KindCost,
    SearchCost,
    SearchWork,
    costs_path,
    load_costs,
    read_costs,
    write_costs,
)


def _flat(num_keys: int, **more: float) -> SearchWork:
    return SearchWork("flat", num_keys, 4, distances=1000, **more)


def test_every_part_of_the_work_has_its_price() -> None:
    cost = KindCost(1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    costs = SearchCost((100,), dict.fromkeys(KINDS, (cost,)))
    work = SearchWork("graph", 100, 2, 1000, 500, 250, 125, 60, 30)
    expected = 1 + 4 + (1000 * (4 + 16) + 500 * (16 + 64) + 250 * 2 * 64) / 1e3
    expected += (125 * 128 + 60 * 256 + 30 * 512) / 1e3
    assert costs.time_us(work) == pytest.approx(expected)
    wider = costs.time_us(work, head_size=256, key_bytes=512)
    assert wider == pytest.approx(expected + (1000 * 20 + 125 * 128 + 60 * 256) / 1e3)


def test_between_two_sizes_costs_lie_between() -> None:
    small, middle, large = (COSTS.time_us(_flat(n)) for n in (4096, 23170, 131072))
    assert middle == pytest.approx((small + large) / 2, rel=1e-4)
    assert COSTS.time_us(_flat(10)) == small and COSTS.time_us(_flat(1 << 22)) == large


def test_what_was_measured_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_RELAY_CACHE", str(tmp_path))
    assert load_costs() == read_costs(SHIPPED_COSTS)
    write_costs(costs_path(), COSTS, {"cpu": "a CPU"})
    assert load_costs() == COSTS
    assert json.loads(costs_path().read_text())["cpu"] == "a CPU"
    assert [path.name for path in tmp_path.iterdir()] == [costs_path().name]


def test_files_of_former_versions_are_read(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    write_costs(path, COSTS, {})
    content = json.loads(path.read_text())
    for entries in content["kinds"].values():
        for entry in entries:
            entry["build_us"] = 6.5
    path.write_text(json.dumps(content))
    assert read_costs(path) == COSTS


def _damage(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **changes}))


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 99},
        {"sizes": [4096]},
        {"sizes": [131072, 4096]},
        {"sizes": None},
        {"kinds": {}},
        {"kinds": None},
        {"kinds": {kind: [{"call_us": 1}] * 2 for kind in KINDS}},
    ],
)
def test_damaged_files_are_refused_by_name(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = tmp_path / "costs.json"
    write_costs(path, COSTS, {})
    assert read_costs(path) == COSTS
    _damage(path, **changes)
    with pytest.raises(ValueError, match=r"costs\.json: not a file of search costs .* again"):
        read_costs(path)


@pytest.mark.parametrize("text", ["", "[]", "{", "null"])
def test_files_of_something_else_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "costs.json").write_text(text)
    with pytest.raises(ValueError, match="not a file of search costs"):
        read_costs(tmp_path / "costs.json")


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), "1", True])
def test_a_cost_is_a_number_from_0(value: Any) -> None:
    with pytest.raises(ValueError, match="call_us is .*, expected a number from 0"):
        KindCost(call_us=value)


def test_unknown_work_is_refused() -> None:
    with pytest.raises(ValueError, match="kind 'hnsw' for 1 queries, expected one of full"):
        COSTS.time_us(SearchWork("hnsw", 10, 1))


def test_a_fit_finds_the_costs_that_made_the_times() -> None:
    true = KindCost(call_us=10, query_us=2, distance_ns=3, distance_query_ns=0.5, hop_ns=80)
    names = ("call_us", "query_us", "distance_ns", "distance_query_ns", "hop_ns", "hop_query_ns")
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(20):
        group, distances, hops = int(rng.integers(1, 8)), *rng.uniform(100, 10_000, 2)
        work = SearchWork("graph", 100, group, float(distances), float(hops))
        time_us = true.time_us(work, 1, 1)
        samples.append(cost_calibration.Sample(work, lambda rows: None, [], [time_us]))
    found = KindCost(**cost_calibration.fit(samples, names, {}))
    for name in names:
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=1e-3, abs=1e-3)


def test_calibration_measures_every_kind_and_stores_it(tmp_path: Path) -> None:
    heard: list[str] = []
    costs = cost_calibration.calibrate_costs(
        sizes=(300, 600), folder=tmp_path, progress=heard.append
    )
    assert heard == ["300 keys", "600 keys"]
    assert load_costs(tmp_path) == costs and costs.sizes == (300, 600)
    for kind in KINDS:
        work = SearchWork(kind, 600, 4, 600, 10, 50, 100, 100)
        assert costs.time_us(work) > 0
        for name, value in vars(costs.kinds[kind][0]).items():
            assert getattr(costs.kinds[kind][1], name) >= value


def test_tune_shows_and_stores_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def calibrate(folder: Path, progress: Any) -> SearchCost:
        write_costs(costs_path(folder), COSTS, {})
        return COSTS

    monkeypatch.setattr(cost_calibration, "calibrate_costs", calibrate)
    text = io.StringIO()
    console = Console(file=text, width=200)
    assert tune.run_sparse_tune(folder=tmp_path, console=console) == 0
    assert str(costs_path(tmp_path)) in text.getvalue() and "4096 keys" in text.getvalue()
    (tmp_path / "file").write_text("")
    with pytest.raises(CommandLineError, match="--folder"):
        tune.run_sparse_tune(folder=tmp_path / "file", console=console)
