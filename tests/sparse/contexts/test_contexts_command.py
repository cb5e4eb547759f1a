# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.sparse import stored_contexts
from vllm_relay.cli import app
from vllm_relay.sparse.contexts.contexts_command import size_text
from vllm_relay.sparse.contexts.disk.context_file import ContextFile

runner = CliRunner()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    stored_contexts.write(tmp_path / "a.relayctx")
    shutil.copy(tmp_path / "a.relayctx", tmp_path / "b[x].relayctx")
    (tmp_path / "notes.txt").write_text("no context")
    return tmp_path


def run(command: str, *arguments: str | Path, answer: str | None = None) -> tuple[int, str]:
    result = runner.invoke(app, ["contexts", command, *map(str, arguments)], input=answer)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def damage(path: Path) -> None:
    """One bit of the values of one head."""
    with ContextFile.open(path) as context:
        offset_bytes = context.file.sections["layers/0/kv_heads/1/values"].offset_bytes
    content = bytearray(path.read_bytes())
    content[offset_bytes] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("command", ["list", "show", "verify"])
def test_whole_contexts(folder: Path, command: str) -> None:
    status, output = run(command, folder)
    assert status == 0
    assert "a.relayctx" in output and "b[x].relayctx" in output and "notes" not in output
    status, output = run(command, folder, "--json")
    assert status == 0
    reports = json.loads(output)
    assert [Path(report["path"]).name for report in reports] == ["a.relayctx", "b[x].relayctx"]
    assert all(report["error"] is None for report in reports)
    assert reports[0]["num_bytes"] == (folder / "a.relayctx").stat().st_size


def test_list_and_show_say_what_a_context_is(folder: Path) -> None:
    for command in ("list", "show"):
        (report,) = json.loads(run(command, folder / "a.relayctx", "--json")[1])
        assert report["fingerprint"]["model"] == "tiny"
        assert report["num_tokens"] == 1000
        assert report["index_kinds"] == {"arrays of tests": 3}
    assert report["bytes_of_parts"] == {
        "tokens": 4000,
        "token_hashes": 62 * 16,
        "keys": 6 * 16_000,
        "values": 6 * 8000,
        "value_means": 6 * 16 * 8,
        "index/links": 3 * 20_000,
    }
    assert report["plans"] == {}
    status, output = run("show", folder / "a.relayctx")
    assert status == 0
    rows = [line.split() for line in output.splitlines()]
    assert ["tokens", "1000"] in rows and ["stored", "keys", "93.8", "KiB"] in rows


def test_damaged_values_are_found_by_verify_only(folder: Path) -> None:
    damage(folder / "a.relayctx")
    assert run("list", folder)[0] == run("show", folder)[0] == 0
    status, output = run("verify", folder)
    assert status == 1
    assert "section 'layers/0/kv_heads/1/values', page 0 of 1" in output
    assert "whole: " in output and "b[x].relayctx" in output
    reports = json.loads(run("verify", folder, "--json")[1])
    assert "CRC-32C" in reports[0]["error"] and reports[1]["error"] is None


@pytest.mark.parametrize("command", ["list", "show", "verify"])
def test_contexts_that_cannot_be_opened_are_shown_with_the_reason(
    folder: Path, command: str
) -> None:
    path = folder / "a.relayctx"
    path.write_bytes(path.read_bytes()[:9000])
    status, output = run(command, folder)
    assert status == 1
    assert f"{path}: 9000 bytes, expected" in output and "b[x].relayctx" in output
    status, output = run(command, folder, "--json")
    assert status == 1 and "truncated" in json.loads(output)[0]["error"]


@pytest.mark.parametrize("command", ["list", "show", "verify", "delete"])
def test_paths_without_a_context_are_refused(folder: Path, command: str) -> None:
    status, output = run(command, folder / "missing")
    assert status == 2 and "does not exist" in output
    status, output = run(command, folder / "notes.txt")
    assert status == 2 and "is no context" in output
    assert (folder / "notes.txt").exists()


def test_an_empty_folder_has_no_contexts(tmp_path: Path) -> None:
    for command in ("list", "show", "verify"):
        status, output = run(command, tmp_path)
        assert status == 0 and "no contexts" in output
        assert json.loads(run(command, tmp_path, "--json")[1]) == []
    assert run("delete", tmp_path)[0] == 0


def test_delete_asks_first(folder: Path) -> None:
    path = folder / "a.relayctx"
    status, output = run("delete", path, answer="n\n")
    assert status == 1 and f"Delete {path}, " in output and "nothing was deleted" in output
    assert path.exists()
    status, output = run("delete", path, answer="")
    assert status == 1 and path.exists()
    status, output = run("delete", path, answer="y\n")
    assert status == 0 and "1 deleted" in output
    assert sorted(each.name for each in folder.iterdir()) == ["b[x].relayctx", "notes.txt"]


def test_delete_takes_damaged_contexts_and_nothing_else(folder: Path) -> None:
    (folder / "a.relayctx").write_bytes(b"")
    status, output = run("delete", folder, "--yes", "--json")
    assert status == 0
    assert [report["error"] for report in json.loads(output)] == [None, None]
    assert [each.name for each in folder.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("whole_folder", [False, True])
def test_training_queries_go_with_their_context(folder: Path, whole_folder: bool) -> None:
    contexts = [folder / "a.relayctx", folder / "b[x].relayctx"]
    orphan = folder / "c.relayqueries"
    for path in (*contexts, orphan):
        path.with_suffix(".relayqueries").write_bytes(b"queries")
    status, output = run("delete", folder if whole_folder else contexts[0], "--yes")
    assert status == 0 and f"{2 if whole_folder else 1} deleted" in output
    left = {each.name for each in folder.iterdir()}
    others = set() if whole_folder else {"b[x].relayctx", "b[x].relayqueries"}
    assert left == {"notes.txt", orphan.name, *others}


def test_training_queries_go_before_their_context(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is killed between the two leaves no queries that nobody would ever remove."""
    (folder / "a.relayqueries").write_bytes(b"queries")
    gone = []
    monkeypatch.setattr(Path, "unlink", lambda path, **_: gone.append(path.suffix))
    run("delete", folder / "a.relayctx", "--yes")
    assert gone == [".relayqueries", ".relayctx"]


def test_the_question_is_asked_beside_the_answer(folder: Path) -> None:
    arguments = ["contexts", "delete", str(folder), "--json"]
    result = runner.invoke(app, arguments, input="y\n")
    assert result.exit_code == 0
    assert result.stdout.startswith("[") and len(json.loads(result.stdout)) == 2
    assert f"Delete 2 contexts in {folder}" in result.stderr


@pytest.mark.parametrize("command", ["list", "show", "verify", "delete"])
def test_an_empty_path_is_not_this_folder(
    folder: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    status, output = run(command, "", answer="y\n")
    assert status == 2 and "given an empty path" in output
    assert (folder / "a.relayctx").exists()
    assert run("list", ".")[0] == 0


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (5 << 29, "2.5 GiB"),
        (3 << 50, "3072.0 TiB"),
    ],
)
def test_sizes_have_units(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text
