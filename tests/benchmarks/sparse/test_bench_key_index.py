# SPDX-License-Identifier: Apache-2.0
"""The whole benchmark at sizes where it takes seconds."""

import json
from pathlib import Path

import pytest

from benchmarks.sparse import bench_key_index
from benchmarks.sparse.heads.corpus import make_head
from benchmarks.sparse.searches import own_searches
from benchmarks.sparse.searches.contenders import Graph, Reference
from benchmarks.support import machine
from tests.benchmarks.sparse.scanning_index import ScanningIndex


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
    assert tables["rope, 1,000 keys: cost at recall@10"][0]["distances at 0.95"] == "1000"
    assert "recall model, layer 1, 110 keys: recall@10" in tables
    assert result["goals"] == []
    assert result["settings"]["kinds"] == ["rope"]


def test_our_indexes_in_every_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Which is one that scores too few keys, so that what it costs is known."""
    monkeypatch.setattr("vllm_relay.sparse.GraphIndex", ScanningIndex, raising=False)
    monkeypatch.setattr(Graph, "efforts", (100, 200, 400))
    result = run(
        monkeypatch, tmp_path / "result.json", "--kinds", "hubs", "--contenders", "GraphIndex"
    )
    tables = {table["title"].partition(": ")[2]: table["rows"] for table in result["tables"]}
    assert list(tables) == [
        "recall@10", "cost at recall@10", "recall@100", "cost at recall@100",
        "4 heads, noise 0.25, one index for all against one each",
        "4 heads, noise 0.25, recall@100", "4 heads, noise 0.5, recall@100",
        "Dipr(beta=50)", "a prefix of 200 tokens", "attention error", "bounds of the dropped mass",
    ]  # fmt: skip
    curve, groups = tables["recall@100"], tables["4 heads, noise 0.25, recall@100"]
    ranges, prefixes = tables["Dipr(beta=50)"], tables["a prefix of 200 tokens"]
    assert [(row["effort"], row["distances"]) for row in curve] == [
        (100, 250), (200, 500), (400, 1000)
    ]  # fmt: skip
    assert [float(row["recall"]) for row in curve] == pytest.approx([0.25, 0.5, 1], abs=0.06)
    assert [row["distances of group"] for row in groups] == [250, 500, 1000]
    assert groups[-1]["least recall in group"] == groups[-1]["recall alone"] == 1
    assert groups[0]["least recall in group"] < 0.4
    assert [row["width"] for row in ranges] == ["default", 100, 200, 400]
    assert [row["mass"] for row in ranges] == pytest.approx([1, 0.25, 0.5, 1], abs=0.35)
    assert ranges[0]["mass"] == ranges[3]["mass"] == 1 > ranges[1]["mass"]
    assert prefixes[0]["distances ratio"] == 0.2
    assert prefixes[0]["recall, whole"] == prefixes[0]["recall, prefix"] == 1
    errors = {row["query"]: row["error, median"] for row in tables["attention error"]}
    assert errors["1000 keys"] < 1e-5 < errors["100 keys"] < errors["10 keys"]
    [sharing] = tables["4 heads, noise 0.25, one index for all against one each"]
    assert sharing["effort"] == 400
    assert sharing["bytes, one each"] == 4 * sharing["bytes, shared"] == 16_000
    assert sharing["recall, one each"] == sharing["recall, shared"] == 1
    [bounds] = tables["bounds of the dropped mass"]
    assert (bounds["queries"], bounds["bound violated"]) == (10, 0)


def test_an_index_that_ignores_the_prefix_is_caught() -> None:
    class Ignoring(ScanningIndex):
        def search(self, queries, query, *, prefix_len=None, **options):
            return super().search(queries, query, **options)

    contender, heads = Graph(), [make_head("flat", keys=100, tests=5, reuse=r) for r in (1, 0.2)]
    contender.index = Ignoring().build(heads[0].keys)
    with pytest.raises(RuntimeError, match="keys found behind the prefix"):
        own_searches.prefix_row(contender, *heads, k=5, effort=400, rounds=1)


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
