# SPDX-License-Identifier: Apache-2.0
"""Options of vLLM's engine, of servers and of questions on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from typer.testing import CliRunner

from tests.tables.fake_engine import FakeEngine
from vllm_relay.cli import app
from vllm_relay.tables import tracing
from vllm_relay.tables.question import RequestOptions
from vllm_relay.tables.shell import command as shell_command
from vllm_relay.tables.shell.engine_arguments import split_arguments


@pytest.fixture(scope="module", autouse=True)
def vllm() -> None:
    pytest.importorskip("vllm")


def test_files_alone() -> None:
    assert split_arguments(["a.csv", "b.csv"]) == ([Path("a.csv"), Path("b.csv")], {})


def test_options_stand_anywhere() -> None:
    given = "--tensor-parallel-size 2 a.csv --max_num_seqs=9 --enforce-eager b.csv --dtype float16"
    files, arguments = split_arguments(given.split())
    assert files == [Path("a.csv"), Path("b.csv")]
    assert arguments == {
        "tensor_parallel_size": 2,
        "max_num_seqs": 9,
        "enforce_eager": True,
        "dtype": "float16",
    }


def test_what_is_given_counts_also_where_it_is_the_default() -> None:
    _, arguments = split_arguments(["--dtype", "auto", "--seed", "0", "a.csv"])
    assert arguments == {"dtype": "auto", "seed": 0}


def test_dotted_options() -> None:
    given = ["--additional-config.relay.min_shared_tokens", "256", "a.csv"]
    files, arguments = split_arguments(given)
    assert files == [Path("a.csv")]
    assert arguments == {"additional_config": {"relay": {"min_shared_tokens": 256}}}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["a.csv", "--tensor-paralel", "2"], "--tensor-paralel"),
        (["--max-num-seqs", "many"], "invalid .*'many'"),
        (["--tensor-parallel-size"], "expected one argument"),
    ],
)
def test_what_is_refused(given: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_arguments(given)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []

    def open_engine(engine: Any, **arguments: Any) -> FakeEngine:
        found.append((engine, arguments))
        return FakeEngine(answer=lambda fields: fields["name"].strip('"'))

    monkeypatch.setattr(shell_command, "open_engine", open_engine)
    return found


def sql(tmp_path: Path, *given: str, environment: dict[str, str] | None = None) -> Any:
    path = tmp_path / "films.csv"
    path.write_text("id,name\n1,ab\n")
    statement = "SELECT llm('What is the {name}?', {name}) AS a FROM films"
    without = {"VLLM_API_KEY": "", "OPENAI_API_KEY": ""}
    return CliRunner().invoke(
        app, ["sql", str(path), "-c", statement, *given], env=without | (environment or {})
    )


def test_a_model_is_started_with_them(tmp_path: Path, opened: list[Any]) -> None:
    result = sql(tmp_path, "--model", "a/b", "--tensor-parallel-size", "2", "--max-running", "7")
    assert result.exit_code == 0, result.output
    assert opened == [("a/b", {"tensor_parallel_size": 2, "max_num_seqs": 7})]


def test_traces_are_those_of_the_model_too(
    tmp_path: Path, opened: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "span_exporter", lambda endpoint: InMemorySpanExporter())
    given = ("--otlp-traces-endpoint", "http://collector:9")
    assert sql(tmp_path, "--model", "a/b", *given).exit_code == 0
    assert opened == [("a/b", {"otlp_traces_endpoint": "http://collector:9"})]
    opened.clear()
    assert sql(tmp_path, "--server", "http://127.0.0.1:1", *given).exit_code == 0
    assert "otlp_traces_endpoint" not in opened[0][1]


def test_images_may_lead_below_their_folder(tmp_path: Path, opened: list[Any]) -> None:
    statement = "SELECT llm('What is {name}?', images := {name: 'path'}) FROM films"
    for given, message in (
        ((), "give image_folder"),
        (("--image-folder", str(tmp_path)), "images given, but"),
    ):
        result = sql(tmp_path, "--model", "a/b", "-c", statement, *given)
        assert result.exit_code == 1 and message in " ".join(result.output.split())


def test_a_server_is_opened_with_its_own(tmp_path: Path, opened: list[Any]) -> None:
    result = sql(
        tmp_path,
        *("--server", "https://far", "--model", "m", "--tokenizer", "org/t", "--max-running", "7"),
        *("--server-mode", "chat", "--timeout-s", "3", "--api-key-env", "MINE"),
        environment={"MINE": "secret", "OPENAI_API_KEY": "sk"},
    )
    assert result.exit_code == 0, result.output
    [(address, arguments)] = opened
    assert address == ["https://far"]
    assert arguments.pop("api_key").value == "secret"
    assert arguments == {
        "data_parallel_ranks": None,
        "model": "m",
        "tokenizer": "org/t",
        "max_running": 7,
        "mode": "chat",
        "timeout_s": 3.0,
    }


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({"OPENAI_API_KEY": "sk"}, None), ({"OPENAI_API_KEY": "sk", "VLLM_API_KEY": "v"}, "v")],
)
def test_other_servers_never_have_the_key_of_openai(
    environment: dict[str, str], expected: str | None, tmp_path: Path, opened: list[Any]
) -> None:
    assert sql(tmp_path, "--server", "https://far", environment=environment).exit_code == 0
    assert opened[0][1]["api_key"].value == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--server", "https://far", "--dtype", "float16"], "--dtype given with --server"),
        (["--server", "https://far", "--kv-events", "tcp://far:1"], "given for one engine"),
        (["--model", "a/b", "--api-key-env", "MINE"], "--api-key-env given without --server"),
        (["--server", "http://far", "--api-key-env", "MINE"], "MINE is not sent to far without"),
        (
            ["--server", "https://far", "--sampling", "{top_p"],
            "--sampling '{top_p' given, expected",
        ),
        (["--server", "https://far", "--sampling", '{"n": 2}'], "sampling with 'n' given"),
        (["--model", "a/b", "--no-such-option"], "--no-such-option"),
    ],
)
def test_what_does_not_fit_is_told(
    given: list[str], message: str, tmp_path: Path, opened: list[Any]
) -> None:
    result = sql(tmp_path, *given, environment={"MINE": "secret"})
    assert result.exit_code == 2 and not opened
    assert message in " ".join(result.stderr.split())


def test_all_questions_are_told(
    tmp_path: Path, opened: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[RequestOptions] = []
    generate = FakeEngine.generate

    def noted(engine: FakeEngine, prompts: Any, question: Any) -> Any:
        asked.append(question.request)
        return generate(engine, prompts, question)

    monkeypatch.setattr(FakeEngine, "generate", noted)
    given = {
        "sampling": {"top_p": 0.9},
        "chat_template_kwargs": {"enable_thinking": False},
        "extra_body": {"cache_salt": "a"},
    }
    options = [part for name, value in given.items()
               for part in (f"--{name.replace('_', '-')}", json.dumps(value))]  # fmt: skip
    result = sql(tmp_path, "--server", "https://far", "--system-prompt", "Be brief.", *options)
    assert result.exit_code == 0, result.output
    assert asked == [RequestOptions("Be brief.", **given)]
