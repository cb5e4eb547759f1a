# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.support.refusals import ended
from tests.tables.fake_engine import FakeEngine
from vllm_relay.cli import app
from vllm_relay.demo import engine_process
from vllm_relay.demo.options import DemoOptions, native_dtype
from vllm_relay.demo.tables import replicas_main
from vllm_relay.demo.tables.engine import TableAnswers, Way
from vllm_relay.demo.tables.run import run_tables_demo
from vllm_relay.demo.tables.workload import tables_workload
from vllm_relay.tables.question import Question

runner = CliRunner()


def recording_console() -> Console:
    return Console(width=200, record=True, force_terminal=False)


@pytest.mark.integration
@pytest.mark.usefixtures("quick_engines")
def test_both_ways_answer_right_and_llm_map_computes_less(tmp_path: Path) -> None:
    console = recording_console()
    options = DemoOptions(keep=tmp_path, json_path=tmp_path / "numbers.json", console=console)
    assert run_tables_demo(options, num_rows=60) == 0, console.export_text()
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    rows, ours = numbers["row_by_row"], numbers["llm_map"]
    assert rows["answers_right"] == ours["answers_right"] == rows["answers"] == 120
    assert rows["prompts"] == 120 > ours["prompts"]
    assert ours["computed_tokens"] < rows["computed_tokens"] / 2
    assert ours["hit_rate"] > rows["hit_rate"]
    assert "answers right" in console.export_text()


def test_replicas_end_with_their_process() -> None:
    engine = FakeEngine()
    replicas_main.stop(engine)
    assert engine.is_closed


class EngineWithoutModel:
    """Answers of `wrong` ways have one mistake."""

    wrong: tuple[Way, ...] = ()

    def __init__(self, *_: Any) -> None: ...

    def __enter__(self) -> EngineWithoutModel:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def wait(self) -> None: ...

    def ask_to_stop(self) -> None: ...

    def ask(self, way: Way, columns: dict[str, list[str]], question: Question) -> TableAnswers:
        workload = tables_workload(num_rows=40, seed=0)
        [right] = [each.answers for each in workload.questions if each.question == question]
        texts: list[str | None] = [*right[: len(columns["gate"])]]
        if way in self.wrong:
            texts[0] = None
        return TableAnswers(texts, len(texts), 100, 50, 10, 2.0 if way == "row_by_row" else 1.0, 0)


@pytest.mark.parametrize(
    "wrong", [(), ("llm_map",), ("row_by_row",), ("replicas",), ("llm_map", "row_by_row")]
)
def test_a_wrong_answer_is_a_failure(
    wrong: tuple[Way, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("vllm_relay.demo.tables.run.TablesEngine", EngineWithoutModel)
    monkeypatch.setattr(EngineWithoutModel, "wrong", wrong)
    monkeypatch.setattr("vllm_relay.demo.tables.run.build_recall_model", lambda folder, **_: folder)
    monkeypatch.setattr(engine_process, "_POLLING_S", 0.0)  # no worker polls
    console = recording_console()
    path = tmp_path / "numbers.json"
    options = DemoOptions(keep=tmp_path, json_path=path, console=console)
    status = run_tables_demo(options, num_rows=40, num_replicas=2)
    text = console.export_text()
    numbers = json.loads(path.read_text())
    assert numbers["num_replicas"] == 2 and numbers["replicas"]["answers"] == 80
    assert status == (1 if wrong else 0)
    assert text.count("2 of 80 answers are wrong") == len(wrong)
    assert ("2.00 times as fast" in text) == (not wrong)
    assert text.rstrip().splitlines()[-1].startswith("Next: vllm-relay sql") == (not wrong)
    assert numbers["num_rows"] == 40 and numbers["llm_map"]["computed_tokens"] == 120


def test_settings_out_of_range_are_explained(tmp_path: Path) -> None:
    for num_rows, given, message in [
        (0, {}, "num_rows is 0, expected at least 1"),
        (1, {"dtype": "int8"}, "dtype is 'int8'"),
        (1, {"json_path": tmp_path / "missing" / "numbers.json"}, "missing"),
    ]:
        console = recording_console()
        options = DemoOptions(**given, keep=tmp_path, console=console)
        status, refusal = ended(
            lambda n=num_rows, given=options: run_tables_demo(given, num_rows=n)
        )
        assert status == 2 and message in refusal


def test_the_command_has_sizes_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def run(options: DemoOptions, **sizes: Any) -> int:
        given.update(sizes, options=options)
        return 3

    monkeypatch.setattr("vllm_relay.demo.tables.run.run_tables_demo", run)
    assert runner.invoke(app, ["demo", "--tables", "--seed", "7"]).exit_code == 3
    assert given["num_rows"] == 480
    assert (given["options"].seed, given["options"].dtype) == (7, native_dtype())
    runner.invoke(app, ["demo", "--tables", "--questions", "5"])
    assert given["num_rows"] == 5


@pytest.mark.parametrize(
    "refused",
    [["--modules"], ["--long"], ["--rounds", "2"], ["--output-tokens", "4"], ["--model", "m"],
     ["--document-tokens", "5000"]],
)  # fmt: skip
def test_the_command_refuses_options_without_effect(refused: list[str]) -> None:
    result = runner.invoke(app, ["demo", "--tables", *refused], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert refused[0] in result.output and "--tables" in result.output
