# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import vllm_relay.tables
from tests.tables.recording_engine import RecordingEngine, Row

FOLDER = Path(__file__).parents[2] / "examples"
MOVIES, RETRIEVAL = FOLDER / "tables_movies.py", FOLDER / "tables_retrieval.py"


def run(
    path: Path, engine: RecordingEngine, monkeypatch: pytest.MonkeyPatch, *options: str
) -> None:
    monkeypatch.setattr(vllm_relay.tables, "open_engine", lambda model: engine, raising=False)
    monkeypatch.setattr(sys, "argv", [str(path), "a-model", *options])
    runpy.run_path(str(path), run_name="__main__")


def test_films_are_judged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(row: Row) -> str:
        if "studio" in row:
            return '{"headline": "h", "stars": 4}' if row["title"] != "Low Water" else "{"
        return "yes" if "songs" in row["about_the_studio"] else "no"

    engine = RecordingEngine(answer)
    run(MOVIES, engine, monkeypatch)
    printed = capsys.readouterr().out
    assert len(engine.messages) == 2 * 6
    assert printed.count("yes") == 4 and printed.count("no  ") >= 3
    assert printed.count("4.0") == 7
    assert "row 3 has no review" in printed and "8 rows, 6 prompts" in printed
    assert engine.num_closed == 1


def retrieval() -> dict[str, Any]:
    return runpy.run_path(str(RETRIEVAL))


def test_texts_are_embedded_by_their_words() -> None:
    embedding = retrieval()["TfIdf"](["the green pear", "the red boat", "the red pear"])
    vectors = embedding.embed(["Green pear!", "the boat", "", "Boat"])
    similar = vectors @ embedding.embed(["the green pear", "the red boat"]).T
    assert similar[0, 0] > similar[0, 1] == 0
    assert similar[1, 1] > similar[1, 0] > 0
    assert not vectors[2].any()
    assert similar[3, 0] == 0 < similar[3, 1]


def test_every_question_has_its_passage_among_the_nearest() -> None:
    pytest.importorskip("faiss")
    texts = json.loads(RETRIEVAL.with_suffix(".json").read_text())
    table = retrieval()["retrieve"](texts["passages"], texts["questions"], 4)
    assert table["question"].to_list() == texts["questions"]
    assert all(len(set(found)) == 4 for found in table["passages"].to_list())
    assert "ninety metres" in table["passages"][0][0]
    assert any("red cupboard" in passage for passage in table["passages"][-1])


@pytest.mark.parametrize("options", [[], ["--keep"], ["--passages", "2"]])
def test_questions_are_answered_by_passages(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("faiss")
    engine = RecordingEngine(lambda row: f"{len(row['passages'])} passages")
    run(RETRIEVAL, engine, monkeypatch, *options)
    printed = capsys.readouterr().out
    assert printed.count("2 passages" if "2" in options else "4 passages") == 26
    assert "26 prompts" in printed


def test_faiss_is_asked_for_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(SystemExit, match="pip install faiss-cpu"):
        run(RETRIEVAL, RecordingEngine(), monkeypatch)
