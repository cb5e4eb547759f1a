# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from vllm_relay import doctor
from vllm_relay.cli import app
from vllm_relay.demo.options import DemoOptions, native_dtype
from vllm_relay.doctor import Backend, Check, Report

runner = CliRunner()


def test_version() -> None:
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.strip() == version("vllm-relay")


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_says_what_there_is(arguments: list[str]) -> None:
    output = runner.invoke(app, arguments).output
    commands = [*(command.callback.__name__ for command in app.registered_commands),
                *(group.name for group in app.registered_groups)]  # fmt: skip
    assert [name for name in commands if name not in output] == []
    assert "│ Commands" not in output and "─ Commands" not in output, "each is in a group"
    for option in ("--attention-backend relay", "relay.scheduler true", "relay_sparse"):
        assert option in output


def test_console_script_is_this_app() -> None:
    (script,) = entry_points(group="console_scripts", name="vllm-relay")
    assert script.load() is app


@pytest.mark.parametrize("can_run", [True, False])
def test_doctor_exit_status_says_whether_relay_can_run(
    can_run: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = Report([Check("Python", "ok", "3.11")], [Backend("RELAY", can_run)])
    monkeypatch.setattr(doctor, "collect_facts", lambda: None)
    monkeypatch.setattr(doctor, "diagnose", lambda facts: report)
    result = runner.invoke(app, ["doctor", "--json"])
    assert result.exit_code == (0 if can_run else 1)
    assert json.loads(result.output)["can_run"] is can_run
    assert runner.invoke(app, ["doctor"]).exit_code == result.exit_code


def test_demo_hands_its_options_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: dict[str, Any] = {}

    def run_demo(options: DemoOptions, model: str | None, **sizes: Any) -> int:
        given.update(sizes, options=options, model=model)
        return 3

    monkeypatch.setattr("vllm_relay.demo.run.run_demo", run_demo)
    results = tmp_path / "results.json"
    result = runner.invoke(
        app,
        [
            "demo",
            "--model",
            "a-model",
            "--system-prompts",
            "2",
            "--questions",
            "5",
            "--json",
            str(results),
        ],
    )
    assert result.exit_code == 3
    assert given["model"] == "a-model"
    assert given["num_system_prompts"] == 2
    assert given["questions_per_prompt"] == 5
    assert given["options"].json_path == results


def test_demo_has_an_option_for_each_of_run_demo() -> None:
    import inspect

    import typer.main

    from vllm_relay.demo.run import run_demo

    options = {parameter.name for parameter in typer.main.get_command(app).commands["demo"].params}
    options -= {"long", "document_tokens", "with_modules", "with_tables", "num_replicas"}
    parameters = {*inspect.signature(run_demo).parameters, *DemoOptions.__annotations__}
    assert options == parameters - {"options", "console"}


def test_demo_with_replicas_is_one_of_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def run_tables_demo(options: DemoOptions, **sizes: Any) -> int:
        given.update(sizes)
        return 0

    monkeypatch.setattr("vllm_relay.demo.tables.run.run_tables_demo", run_tables_demo)
    for option in ([], ["--tables"]):
        assert runner.invoke(app, ["demo", "--replicas", "2", *option]).exit_code == 0
        assert given == {"num_rows": 480, "num_replicas": 2}
    for refused in (["--long"], ["--model", "m"]):
        assert runner.invoke(app, ["demo", "--replicas", "2", *refused]).exit_code == 2
    assert runner.invoke(app, ["demo", "--replicas", "1"]).exit_code == 2


def test_demo_of_modules_has_sizes_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def run_modules_demo(options: DemoOptions, **sizes: Any) -> int:
        given.update(sizes)
        return 0

    monkeypatch.setattr("vllm_relay.demo.modules.run.run_modules_demo", run_modules_demo)
    assert runner.invoke(app, ["demo", "--modules"]).exit_code == 0
    assert (given["num_questions"], given["output_tokens"]) == (24, 4)
    assert runner.invoke(app, ["demo", "--modules", "--questions", "5"]).exit_code == 0
    assert given["num_questions"] == 5
    for refused in (["--rounds", "2"], ["--long"]):
        assert runner.invoke(app, ["demo", "--modules", *refused]).exit_code == 2


def test_demo_of_long_contexts_has_sizes_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def run_long_demo(options: DemoOptions, **sizes: Any) -> int:
        given.update(sizes, options=options)
        return 3

    monkeypatch.setattr("vllm_relay.demo.long_contexts.run.run_long_demo", run_long_demo)
    assert runner.invoke(app, ["demo", "--long", "--seed", "7"]).exit_code == 3
    assert given["document_tokens"] == 24_000
    assert (given["num_questions"], given["output_tokens"]) == (6, 8)
    assert (given["options"].dtype, given["options"].seed) == (native_dtype(), 7)
    sizes = ["--document-tokens", "5000", "--questions", "24", "--output-tokens", "4"]
    runner.invoke(app, ["demo", "--long", *sizes])
    assert given["document_tokens"] == 5000
    assert (given["num_questions"], given["output_tokens"]) == (24, 4)


@pytest.mark.parametrize(
    ("arguments", "option", "reason"),
    [
        (["--long", "--model", "a-model"], "--model", "--long"),
        (["--long", "--rounds", "2"], "--rounds", "--long"),
        (["--long", "--system-prompts", "1"], "--system-prompts", "--long"),
        (["--document-tokens", "5000"], "--document-tokens", "--long"),
        (
            ["--model", "smollm2", "--system-prompt-tokens", "9"],
            "--system-prompt-tokens",
            "smollm2",
        ),
    ],
)
def test_demo_refuses_options_without_effect(
    arguments: list[str], option: str, reason: str
) -> None:
    result = runner.invoke(app, ["demo", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert option in result.output
    assert reason in result.output


def test_demo_refuses_a_count_below_one() -> None:
    result = runner.invoke(app, ["demo", "--questions", "0"])
    assert result.exit_code == 2
    assert "questions" in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["doctor", "--nosuch"],
        ["demo", "--modules", "--questions", "0"],
        ["demo", "--tables", "--dtype", "int8"],
        ["predict", "nowhere.jsonl", "--block-size", "16", "--blocks", "9"],
        ["predict", "x.jsonl", "--blocks", "9", "--eviction", "queue"],
        ["tune", "--heads", "5", "--kv-heads", "2"],
        ["calibrate", "./nowhere", "-o", "costs.json"],
        ["contexts", "verify", "nowhere"],
        ["modules", "check", "nowhere.xml"],
        ["sql", "nowhere.csv", "-c", "SELECT 1"],
    ],
    ids=" ".join,
)
def test_every_command_refuses_its_command_line_alike(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    result = runner.invoke(app, arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert result.stderr.startswith("error: ") or "Usage: " in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["doctor"], ["contexts", "list", "."]], ids=" ".join)
def test_ctrl_c_ends_with_a_line(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "collect_facts", interrupt)
    monkeypatch.setattr("vllm_relay.sparse.contexts.contexts_command.find_contexts", interrupt)
    result = runner.invoke(app, arguments)
    assert (result.exit_code, result.output) == (130, "interrupted\n")


@pytest.mark.parametrize("error", [KeyboardInterrupt, EOFError])
def test_ctrl_c_at_a_question(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        try:
            raise error
        except error:
            raise typer.Abort from None

    monkeypatch.setattr(doctor, "collect_facts", interrupt)
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == (130 if error is KeyboardInterrupt else 1)
    assert (result.output == "interrupted\n") == (error is KeyboardInterrupt)
