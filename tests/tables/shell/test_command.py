# SPDX-License-Identifier: Apache-2.0
"""`vllm-relay sql` with an engine that answers with a field."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.support.refusals import ended
from tests.tables.fake_engine import FakeEngine, Fields, RefusedPrompt
from vllm_relay.tables.jobs import asking, estimating
from vllm_relay.tables.shell import command as shell_command
from vllm_relay.tables.shell.command import run_sql
from vllm_relay.tables.sql.connection import Connection
from vllm_relay.tables.sql.replay.answers import Answers

QUERY = "SELECT id, llm('What is the {name}?', {name}) AS answer FROM films"


@pytest.fixture
def films(tmp_path: Path) -> Path:
    path = tmp_path / "films.csv"
    path.write_text("id,name\n1,ab\n2,cd\n3,ab\n")
    return path


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    fake = FakeEngine(answer=lambda fields: fields["name"].strip('"'))
    monkeypatch.setattr(shell_command, "open_engine", lambda *_, **__: fake)
    return fake


def run(paths: list[Any], **given: Any) -> tuple[int, str]:
    """The exit status, and what was printed or why the arguments are refused."""
    printed = io.StringIO()
    arguments: dict[str, Any] = {
        "model": None, "server": "http://host", "command": None, "options": {}, "request": {},
        "on_error": "null", "server_arguments": {}, "max_running": None, "output_path": None,
        "console": Console(file=printed, width=100),
    }  # fmt: skip
    status, refusal = ended(lambda: run_sql(paths, **{**arguments, **given}))
    return status, refusal or printed.getvalue()


def test_rows_are_shown_and_what_they_took(
    films: Path, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    status, printed = run([films], command=QUERY)
    assert status == 0
    assert [line.split("│")[2].strip() for line in printed.splitlines() if "│" in line][2:] == [
        "ab",
        "cd",
        "ab",
    ]
    assert len(engine.prompts) == 2
    assert "3 rows; 2 different" in capsys.readouterr().err


def test_each_statement_shows_its_rows(films: Path, engine: FakeEngine) -> None:
    status, printed = run([films], command=f"SELECT 11 AS x; {QUERY}; SELECT ';22' AS y;")
    assert status == 0
    assert printed.index(" 11 ") < printed.index(" cd ") < printed.index(" ;22 ")


def test_rows_are_written_to_a_file(films: Path, engine: FakeEngine, tmp_path: Path) -> None:
    output = tmp_path / "out.csv"
    status, printed = run([films], command=QUERY, output_path=output)
    assert (status, printed) == (0, "")
    assert output.read_text() == "id,answer\n1,ab\n2,cd\n3,ab\n"


def test_statements_are_read_from_the_input(
    films: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"CREATE TABLE a AS {QUERY};\nSELECT id FROM a;"))
    status, printed = run([films])
    assert status == 0 and "│  3 │" in printed.replace("     3 │", "  3 │")


AN_OUTPUT = "id,answer\n1,ab\n2,cd\n3,ab\n"


def give(statements: str, is_piped: bool, monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """Arguments of `run`; a line for each statement where they are piped."""
    monkeypatch.setattr("sys.stdin", io.StringIO(statements.replace("; ", ";\n")))
    return {"command": None if is_piped else statements}


@pytest.mark.parametrize("is_piped", [False, True])
@pytest.mark.parametrize(
    "before",
    [
        f"CREATE TABLE made AS {QUERY}",
        f"CREATE TABLE made (id INT, answer VARCHAR); INSERT INTO made {QUERY}",
        "SET threads = 2",
        "PRAGMA threads = 2",
        "SHOW TABLES",
        "SELECT 11 AS x",
        f"EXPLAIN {QUERY}",
    ],
)
def test_rows_of_the_last_statement_are_written_only(
    before: str,
    is_piped: bool,
    films: Path,
    engine: FakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = tmp_path / "out.csv"
    statements = give(f"{before}; {QUERY}; -- the end", is_piped, monkeypatch)
    status, printed = run([films], output_path=output, **statements)
    assert status == 0
    assert output.read_text() == AN_OUTPUT
    # the others are shown as without an output
    assert printed == run([films], **give(before, is_piped, monkeypatch))[1] != ""


@pytest.mark.parametrize("is_piped", [False, True])
@pytest.mark.parametrize(
    ("last", "rows"),
    [
        ("SHOW TABLES", "name\nfilms\n"),
        ("PRAGMA show_tables", "name\nfilms\n"),
        ("CREATE TABLE t (a INT); INSERT INTO t VALUES (5) RETURNING a AS b", "b\n5\n"),
        (f"CREATE TABLE t (a INT, b TEXT); INSERT INTO t {QUERY} RETURNING b", "b\nab\ncd\nab\n"),
        ("SELECT 1 AS x; SELECT 2 AS y", "y\n2\n"),
    ],
)
def test_any_rows_are_written(
    last: str,
    rows: str,
    is_piped: bool,
    films: Path,
    engine: FakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = tmp_path / "out.csv"
    assert run([films], output_path=output, **give(last, is_piped, monkeypatch))[0] == 0
    assert output.read_text() == rows


@pytest.mark.parametrize("is_piped", [False, True])
@pytest.mark.parametrize(
    "last",
    [
        f"CREATE TABLE made AS {QUERY}",
        f"CREATE TABLE made (id INT, answer VARCHAR); INSERT INTO made {QUERY}",
        "SET threads = 2",
        "CREATE TABLE made AS SELECT 'returning' AS a",
        "CREATE TABLE made (a TEXT); INSERT INTO made VALUES ('returning')",
    ],
)
def test_an_output_without_rows_is_refused_before_anything_is_run(
    last: str,
    is_piped: bool,
    films: Path,
    engine: FakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "out.csv"
    statements = give(f"{QUERY}; {last}", is_piped, monkeypatch)
    assert run([films], output_path=output, **statements) == (1, "")
    message = " ".join(capsys.readouterr().err.split())
    end = " ".join(last.rpartition("; ")[2].split()[:3])
    assert f"the last statement gives no rows: {end}" in message and "SELECT" in message
    assert not engine.prompts and not output.exists()


def test_of_several_statements_the_last_is_named(
    films: Path, engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run([films], command="SELECT 1; SET threads = 2", output_path=tmp_path / "out.csv")
    assert "gives no rows: SET threads = 2;" in " ".join(capsys.readouterr().err.split())


def test_an_output_without_a_statement_is_refused(
    films: Path, engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([films], command="-- nothing", output_path=tmp_path / "out.csv") == (1, "")
    assert "--output given without a statement" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_writes_the_rows_of_each_statement(
    films: Path,
    engine: FakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "out.csv"
    lines = [f"{QUERY};", "SET threads = 2;", "SELECT nothing;"]
    seen: list[str] = []

    def type_line(prompt: str) -> str:
        seen.append(output.read_text() if output.exists() else "")
        if not lines:
            raise EOFError
        return lines.pop(0)

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", type_line)
    assert run([films], output_path=output)[0] == 0
    assert seen == ["", AN_OUTPUT, AN_OUTPUT, AN_OUTPUT]
    told = " ".join(capsys.readouterr().err.split())
    assert told.count("in place of those before") == 1 and "nothing" in told
    lines = ["SELECT 7 AS x;"]
    assert run([films], output_path=output)[0] == 0
    assert output.read_text() == "x\n7\n"


def test_explain_asks_nothing(films: Path, engine: FakeEngine) -> None:
    def refuse(fields: Fields) -> str:
        raise AssertionError("asked")

    engine.answer = refuse
    status, printed = run([films], command=f"EXPLAIN {QUERY}")
    assert status == 0 and "2 different" in printed


@pytest.mark.parametrize("is_piped", [False, True])
@pytest.mark.parametrize(
    ("refused", "condition", "status"),
    [
        (["ab", "cd"], "", 1),
        (["ab"], "", 0),
        (["ab"], "WHERE id <> 2", 1),
        (["ab"], "WHERE id > 3", 0),
        (["ab", "cd"], "WHERE llm('Is {id} known?', return := 'bool')", 0),
    ],
)
def test_a_statement_without_any_answer_has_failed(
    refused: list[str],
    condition: str,
    status: int,
    is_piped: bool,
    films: Path,
    engine: FakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def answer(fields: Fields) -> str:
        if "name" not in fields:
            return "true"
        name = fields["name"].strip('"')
        if name in refused:
            raise RefusedPrompt("no")
        return name

    engine.answer = answer
    text = f"CREATE TABLE made AS {QUERY} {condition}; SELECT 'the next one' AS x"
    given = give(text, is_piped, monkeypatch)
    found, printed = run([films], **given)
    assert (found, "the next one" in printed) == (status, status == 0)
    number = 1 if condition else 2
    error = f"error: {number} of {number} different rows have no answer"
    assert (error in capsys.readouterr().err.splitlines()) == (status == 1)


def test_rows_without_answers_are_written(
    films: Path, engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.csv"
    query = "SELECT id, llm('{name}?', return := 'int') AS answer FROM films"
    assert run([films], command=query, output_path=output)[0] == 1
    assert output.read_text() == "id,answer\n1,\n2,\n3,\n"


def test_statements_without_llm_need_no_model(
    films: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([films], server=None, command="SELECT count(*) FROM films")[0] == 0
    assert run([films], server=None, command=QUERY)[0] == 1
    assert "give --model or --server" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"options": {"order": "best"}}, "order='best'"),
        ({"on_error": "stop"}, "on_error='stop'"),
        ({"output_path": Path("out.xlsx")}, "ends with one of"),
        ({"output_path": Path("nowhere/out.csv")}, "cannot write there"),
        ({"server": None, "model": "./nowhere"}, "no config.json"),
        ({"server": None, "model": "not/a/folder"}, "--model not/a/folder: no such folder"),
        ({"server": "host:80"}, "--server 'host:80' given, expected an address"),
        ({"server": "10.0.0.1:80/v1", "model": "m"}, "give http://10.0.0.1:80/v1"),
        ({"server": ""}, "--server '' given, expected an address"),
        ({"server": "ftp://host"}, "begins with http:// or https://"),
        ({"server": "http://"}, "and a host, as in http://localhost:8000"),
        ({"server": ["http://127.0.0.1:1", "http://127.0.0.1:1/v1"]}, "which are one"),
        ({"server": "http://host:port"}, "and a host, as in"),
        ({"server": "http://[::1"}, "and a host, as in"),
        ({"server": ["http://a", "b:80"]}, "--server 'b:80' given, expected an address"),
        ({"replicas": 2}, "--replicas given with --server"),
        (
            {"server": None, "model": "m", "server_arguments": {"kv_events": ["tcp://a:1"]}},
            "--kv-events given without",
        ),
        (
            {"server": ["http://a"], "server_arguments": {"kv_events": ["tcp://a:1"]}},
            "given for one engine",
        ),
        (
            {"server": ["http://a", "http://b"], "server_arguments": {"kv_events": ["tcp://a:1"]}},
            "expected those of 2",
        ),
        (
            {
                "server": ["http://a", "http://b"],
                "server_arguments": {"kv_events": ["tcp://a:1", "b:1"]},
            },
            "KV events at 'b:1' given, expected tcp://HOST:PORT",
        ),
        (
            {"server": None, "model": "m", "data_parallel_ranks": 2},
            "--data-parallel-ranks given without --server",
        ),
    ],
)
def test_arguments_that_are_refused(
    given: dict[str, Any], message: str, films: Path, engine: FakeEngine
) -> None:
    status, refusal = run([films], **{"command": "SELECT 1", **given})
    assert status == 2 and message in refusal
    assert not engine.prompts


@pytest.mark.parametrize(
    ("command", "message"),
    [("SELECT nothing FROM films", "nothing"), ("SELECT llm(1) FROM films", "llm")],
)
def test_statements_that_are_refused(
    command: str,
    message: str,
    films: Path,
    engine: FakeEngine,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run([films], command=command) == (1, "")
    assert message in " ".join(capsys.readouterr().err.split())
    assert not engine.prompts


def opened_with(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What engines are opened with from now on."""
    found: list[Any] = []

    def open_engine(engine: Any, **arguments: Any) -> FakeEngine:
        found.append((engine, arguments))
        return FakeEngine()

    monkeypatch.setattr(shell_command, "open_engine", open_engine)
    return found


def test_several_servers_and_their_ranks(films: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = opened_with(monkeypatch)
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    servers = ["http://localhost:1", "http://localhost:2"]
    given = {"server_arguments": {"kv_events": ["tcp://a:1", "tcp://b:1,tcp://b:9"]}}
    assert run([films], server=servers, command=QUERY, data_parallel_ranks=2, **given)[0] == 0
    [(engine, arguments)] = found
    assert engine == servers
    assert arguments["data_parallel_ranks"] == 2 and arguments["api_key"].value == "secret"
    assert arguments["kv_events"] == given["server_arguments"]["kv_events"]


def test_keys_that_differ_are_refused(films: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("OPENAI_API_KEY", "other")
    servers = ["http://localhost:1", "https://api.openai.com"]
    status, refusal = run([films], server=servers, command=QUERY)
    assert status == 2 and "servers that are sent different keys" in refusal


def test_replicas_of_a_model(films: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = opened_with(monkeypatch)
    (tmp_path / "config.json").write_text("{}")
    given = {"server": None, "model": str(tmp_path), "command": QUERY}
    assert run([films], replicas=2, **given)[0] == run([films], **given)[0] == 0
    assert found == [(str(tmp_path), {"replicas": 2}), (str(tmp_path), {})]


def test_a_statement_that_fails_ends_a_script(
    films: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("SELECT nothing;\nCREATE TABLE a AS SELECT 1;"))
    assert run([films])[0] == 1


def test_an_interrupted_statement_can_be_run_again(
    films: Path, engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tmp_path / "answers"
    options = {"checkpoint": checkpoint}

    def interrupt(step: int) -> None:
        if step == 1:
            raise KeyboardInterrupt

    engine.max_running = 1
    engine.before_step = interrupt
    assert run([films], command=QUERY, options=options)[0] == 130
    assert "run the statement again" in capsys.readouterr().err
    asked = len(engine.prompts)
    engine.before_step = None
    assert run([films], command=QUERY, options=options)[0] == 0
    assert "1 known" in capsys.readouterr().err
    assert len(engine.prompts) == asked + 1


def test_what_an_interrupt_loses_is_told(
    films: Path, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(step: int) -> None:
        raise KeyboardInterrupt

    engine.before_step = interrupt
    assert run([films], command=QUERY)[0] == 130
    assert "are lost; give --checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (Answers, "look_up", KeyboardInterrupt()),
        (Connection, "sql", RuntimeError("Query interrupted")),
    ],
    ids=["in a function", "in a query"],
)
def test_an_interrupt_that_duckdb_hears_is_no_error(
    owner: type,
    name: str,
    error: BaseException,
    films: Path,
    engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupt(*_: Any) -> None:
        raise error

    monkeypatch.setattr(owner, name, interrupt)
    assert run([films], command=QUERY) == (130, "")
    printed = capsys.readouterr().err
    assert printed.startswith("interrupted: ") and "Traceback" not in printed


@pytest.mark.parametrize("statement", ["SELECT KeyboardInterrupt FROM films",
                                       "SELECT CAST('Query interrupted' AS INT)"])  # fmt: skip
def test_a_text_about_interrupts_is_none(
    statement: str, films: Path, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([films], command=statement)[0] == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_an_estimate_says_how_far_it_is(
    films: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[float] = []

    @contextmanager
    def recording(what: str, show: bool | None) -> Iterator[Callable[[str, float], None]]:
        yield lambda what, part_done: told.append(part_done)

    monkeypatch.setattr(asking, "showing_progress", recording)
    monkeypatch.setattr(estimating, "_PROMPTS_PER_PART", 1)
    assert run([films], command=f"EXPLAIN {QUERY}")[0] == 0
    assert told == [0.5, 1.0, 1.0]
