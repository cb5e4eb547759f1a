# SPDX-License-Identifier: Apache-2.0
"""The whole benchmark at sizes where it takes seconds."""

import json
from pathlib import Path

import pytest

from benchmarks import bench_key_index, machine
from benchmarks.sparse import plots
from benchmarks.sparse.contenders import Reference, own_contenders


@pytest.fixture(autouse=True)
def no_measuring_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "measure_peak", lambda threads=1: {})


def run(monkeypatch: pytest.MonkeyPatch, path: Path, *arguments: str) -> dict:
    argv = ["bench_key_index", "--smoke", "--json", str(path), *arguments]
    monkeypatch.setattr("sys.argv", argv)
    bench_key_index.main()
    return json.loads(path.read_text())


def test_the_oracle_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = run(
        monkeypatch, tmp_path / "result.json",
        "--contenders", "reference", "--kinds", "rope", "--recall-tokens", "120",
    )  # fmt: skip
    tables = {table["title"]: table["rows"] for table in result["tables"]}
    rows = tables["rope, 1,000 keys: recall@100"]
    assert [(row["contender"], row["recall"], row["distances"]) for row in rows] == [
        ("reference", "1.0000", 1000)
    ]
    assert tables["rope, 1,000 keys: cost at recall@10"][0]["us at 0.95"] > 0
    assert "recall model, layer 1, 110 keys: recall@10" in tables
    assert result["goals"] == []
    assert result["settings"]["kinds"] == ["rope"]


def test_our_indexes_in_every_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = own_contenders()
    if not own:
        pytest.skip("vllm_relay.sparse has no index yet")
    result = run(
        monkeypatch, tmp_path / "result.json",
        "--kinds", "hubs", "--contenders", *(contender.name for contender in own),
    )  # fmt: skip
    titles = [table["title"].partition(": ")[2] for table in result["tables"]]
    assert titles == [
        "recall@10", "cost at recall@10", "recall@100", "cost at recall@100",
        "4 heads, noise 0.25, recall@100", "4 heads, noise 0.5, recall@100",
        "Dipr(beta=50)", "a prefix of 200 tokens", "attention error",
    ]  # fmt: skip
    assert len(plots.plot_result(result, tmp_path)) == 3


def test_contenders_are_chosen_by_name() -> None:
    assert bench_key_index.choose_contenders(["reference"]) == [Reference]
    with pytest.raises(SystemExit, match=r"no GraphindeX; there are .*'reference'"):
        bench_key_index.choose_contenders(["GraphindeX"])


def test_a_model_needs_a_text(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path / "result.json", "--model", str(tmp_path))
    assert "--model is given without --text" in capsys.readouterr().err
