# SPDX-License-Identifier: Apache-2.0
"""The folders of contexts: one for each rank of engines with tensor parallelism; who may read."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path

import numpy as np
import pytest

from tests.sparse import stored_contexts
from tests.sparse.contexts.test_contexts_command import damage, run
from vllm_relay.sparse.contexts.disk.context_folder import (
    FoundContext,
    find_contexts,
    make_private_folder,
    rank_folder,
)
from vllm_relay.sparse.contexts.disk.disk_context_store import DiskContextStore
from vllm_relay.sparse.files.section_file import SectionWriter

COMMANDS = ["list", "show", "verify"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two ranks, of which both have `whole` and the first has `partial`."""
    for rank in range(2):
        rank_folder(tmp_path, rank, 2).mkdir()
        stored_contexts.write(tmp_path / f"rank-{rank}-of-2" / "whole.relayctx")
    shutil.copy(
        tmp_path / "rank-0-of-2" / "whole.relayctx", tmp_path / "rank-0-of-2" / "partial.relayctx"
    )
    return tmp_path


def paths(folder: Path, name: str, *ranks: int) -> tuple[Path, ...]:
    return tuple(folder / f"rank-{rank}-of-2" / f"{name}.relayctx" for rank in ranks)


def test_one_rank_has_no_folder_of_its_own(tmp_path: Path) -> None:
    assert rank_folder(tmp_path, 0, 1) == tmp_path
    assert rank_folder(tmp_path, 1, 4) == tmp_path / "rank-1-of-4"


def test_a_context_is_what_all_ranks_have(folder: Path) -> None:
    partial, whole = find_contexts(folder)
    assert whole == FoundContext(folder / "whole.relayctx", paths(folder, "whole", 0, 1))
    assert whole.problem is None
    assert (partial.files, partial.missing) == (
        paths(folder, "partial", 0),
        paths(folder, "partial", 1),
    )
    assert partial.problem == (
        f"{folder / 'partial.relayctx'}: 1 of 2 ranks have it, engines leave it out; missing: "
        "rank-1-of-2"
    )


def test_one_of_them_is_found_by_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for path in (folder / "whole.relayctx", Path("whole.relayctx")):
        [found] = find_contexts(path)
        assert [file.name for file in found.files] == ["whole.relayctx"] * 2
    [file] = find_contexts(folder / "rank-0-of-2" / "whole.relayctx")
    assert file.files == paths(folder, "whole", 0)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        find_contexts(folder / "another.relayctx")


def test_engines_with_other_numbers_of_ranks_share_a_folder(folder: Path) -> None:
    shutil.copytree(folder / "rank-0-of-2", folder / "rank-2-of-3")
    shutil.copy(folder / "rank-0-of-2" / "whole.relayctx", folder / "single.relayctx")
    for name in ("rank-3-of-3", "rank-x-of-2", "rank-0-of-20-old"):  # no rank writes there
        shutil.copytree(folder / "rank-0-of-2", folder / name)
    found = [(each.path.name, len(each.files), len(each.missing)) for each in find_contexts(folder)]
    assert found == [
        ("single.relayctx", 1, 0),
        ("partial.relayctx", 1, 1),
        ("whole.relayctx", 2, 0),
        ("partial.relayctx", 1, 2),
        ("whole.relayctx", 1, 2),
    ]


def test_a_rank_whose_folder_is_missing_has_nothing(folder: Path) -> None:
    shutil.rmtree(folder / "rank-1-of-2")
    assert all(each.problem is not None for each in find_contexts(folder))


def test_list_has_one_line_for_all_ranks(folder: Path) -> None:
    status, output = run("list", folder / "whole.relayctx")
    assert status == 0
    [row] = [line.split() for line in output.splitlines() if "whole" in line]
    assert row[:4] == ["whole.relayctx", "tiny", "1000", "2"]
    [report] = json.loads(run("list", folder / "whole.relayctx", "--json")[1])
    files = paths(folder, "whole", 0, 1)
    assert report["path"] == str(folder / "whole.relayctx") and report["num_ranks"] == 2
    assert report["num_bytes"] == sum(file.stat().st_size for file in files)
    assert report["index_kinds"] == {"arrays of tests": 6}
    [of_one] = json.loads(run("list", files[0], "--json")[1])
    assert (of_one["num_ranks"], of_one["path"]) == (1, str(files[0]))


@pytest.mark.parametrize("command", ["show", "verify"])
def test_files_are_shown_and_verified_one_by_one(folder: Path, command: str) -> None:
    files = paths(folder, "whole", 0, 1)
    status, output = run(command, folder / "whole.relayctx")
    assert status == 0 and all(str(file) in output for file in files)
    reports = json.loads(run(command, folder / "whole.relayctx", "--json")[1])
    assert [report["path"] for report in reports] == [str(file) for file in files]


@pytest.mark.parametrize("command", COMMANDS)
def test_what_some_ranks_have_is_said(folder: Path, command: str) -> None:
    status, output = run(command, folder)
    assert status == 1
    assert f"{folder / 'partial.relayctx'}: 1 of 2 ranks have it" in output
    assert "whole.relayctx: " not in output
    reports = json.loads(run(command, folder, "--json")[1])
    [wrong] = [report for report in reports if report["error"]]
    assert wrong["path"] == str(folder / "partial.relayctx")
    (folder / "rank-0-of-2" / "partial.relayctx").unlink()
    assert run(command, folder)[0] == 0


def test_damage_in_any_rank_is_found(folder: Path) -> None:
    damage(folder / "rank-1-of-2" / "whole.relayctx")
    status, output = run("verify", folder / "whole.relayctx")
    assert status == 1
    assert f"whole: {folder / 'rank-0-of-2'}" in output and "CRC-32C" in output
    assert run("list", folder / "whole.relayctx")[0] == 0
    (folder / "rank-1-of-2" / "whole.relayctx").write_bytes(b"")
    assert run("list", folder / "whole.relayctx")[0] == 1
    assert len(json.loads(run("list", folder / "whole.relayctx", "--json")[1])) == 1


def test_delete_removes_a_context_from_all_ranks(folder: Path) -> None:
    for file in paths(folder, "whole", 0, 1):
        file.with_suffix(".relayqueries").write_bytes(b"queries")
    size = sum(file.stat().st_size for file in paths(folder, "whole", 0, 1))
    status, output = run("delete", folder / "whole.relayctx", answer="y\n")
    assert status == 0 and "1 deleted" in output
    assert f"Delete {folder / 'whole.relayctx'}, {size / 1024:.1f} KiB?" in output
    left = [each.name for each in folder.rglob("*.relay*")]
    assert left == ["partial.relayctx"]


def test_delete_of_the_folder_removes_all_and_leaves_the_folders(folder: Path) -> None:
    status, output = run("delete", folder, "--yes")
    assert status == 0 and "2 deleted" in output
    assert sorted(each.name for each in folder.rglob("*")) == ["rank-0-of-2", "rank-1-of-2"]
    reports = json.loads(run("delete", folder, "--yes", "--json")[1])
    assert reports == []


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_folders_that_are_made_are_for_their_owner_and_others_stay(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    there.chmod(0o755)
    make_private_folder(there / "made" / "rank-0-of-2")
    assert _mode(there / "made") == _mode(there / "made" / "rank-0-of-2") == 0o700
    (there / "made").chmod(0o750)
    make_private_folder(there / "made")
    assert (_mode(there), _mode(there / "made")) == (0o755, 0o750)
    (there / "file").write_bytes(b"")
    for path in (there / "file", there / "file" / "folder"):
        with pytest.raises(OSError, match="exists|[Nn]ot a directory"):
            make_private_folder(path)


def test_files_are_for_their_owner_while_they_are_written_and_afterwards(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with SectionWriter(tmp_path / "file", {}) as writer:
            [unfinished] = tmp_path.iterdir()
            assert _mode(unfinished) == 0o600
            writer.add("a", np.arange(3))
        assert _mode(tmp_path / "file") == 0o600
        store = DiskContextStore(tmp_path / "contexts", stored_contexts.FINGERPRINT)
        assert _mode(tmp_path / "contexts") == 0o700
        store.close()
    finally:
        os.umask(before)
