# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.sparse import writer_main
from vllm_relay.sparse.files.section_file import SectionFile, SectionWriter, write_sections
from vllm_relay.sparse.files.section_writer import remove_unfinished

ROOT = Path(__file__).parents[3]


def start_writer(path: Path, first_version: int) -> subprocess.Popen[bytes]:
    """Returns when it is about to write."""
    command = [sys.executable, "-m", "tests.sparse.writer_main", str(path), str(first_version)]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"begins\n"
    return writer


def unfinished(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name.startswith(".relay-"))


@pytest.mark.parametrize("part_rows", [1, 63, 64, 100, 999, 5000])
def test_parts_of_any_size_give_the_same_file(tmp_path: Path, part_rows: int) -> None:
    rows = np.random.default_rng(0).random((5000, 24))  # 192 bytes a row, pages of 4096
    with SectionWriter(tmp_path / "whole", {}, page_bytes=4096) as writer:
        writer.add("rows", rows)
    with (
        SectionWriter(tmp_path / "parts", {}, page_bytes=4096) as writer,
        writer.section("rows", rows.dtype, rows.shape) as section,
    ):
        for begin in range(0, len(rows), part_rows):
            section.write(rows[begin : begin + part_rows])
    assert (tmp_path / "parts").read_bytes() == (tmp_path / "whole").read_bytes()
    with SectionFile.open(tmp_path / "parts", verify="now") as file:
        assert np.array_equal(file["rows"], rows)


def test_the_header_may_be_completed_while_writing(tmp_path: Path) -> None:
    with SectionWriter(tmp_path / "file", {"a": 1}) as writer:
        writer.add("b", np.arange(3))
        writer.header["c"] = (2, 3)
    assert SectionFile.open(tmp_path / "file").header == {"a": 1, "c": [2, 3]}


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({1: 2}, "key 1 of type int"),
        ({"a": {"b": [0, float("nan")]}}, r"header\['a'\]\['b'\]\[1\] is nan"),
        ({"a": float("inf")}, "finite"),
        ({"a": np.int64(3)}, "is a int64"),
        ({"a": b""}, "is a bytes"),
    ],
)
def test_headers_that_json_does_not_give_back_are_refused(
    tmp_path: Path, header: dict, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        write_sections(tmp_path / "file", header, {})
    with pytest.raises(ValueError, match=reason), SectionWriter(tmp_path / "file", {}) as writer:
        writer.header.update(header)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([object()]), np.zeros(2, "M8[s]")])
def test_dtypes_that_cannot_be_stored_are_refused(tmp_path: Path, array: np.ndarray) -> None:
    with pytest.raises(ValueError, match="section 'array': dtype"):
        write_sections(tmp_path / "file", {}, {"array": array})
    assert not list(tmp_path.iterdir())


def add_twice(writer: SectionWriter) -> None:
    writer.add("a", np.arange(3))
    writer.add("a", np.arange(3))


def write_too_much(writer: SectionWriter) -> None:
    with writer.section("a", np.int32, (2, 3)) as section:
        section.write(np.zeros((1, 3), np.int32))
        section.write(np.zeros((2, 3), np.int32))


def write_too_little(writer: SectionWriter) -> None:
    with writer.section("a", np.int32, (2, 3)) as section:
        section.write(np.zeros((1, 3), np.int32))


def write_another_dtype(writer: SectionWriter) -> None:
    with writer.section("a", np.int32, (2, 3)) as section:
        section.write(np.zeros((2, 3), np.float32))


def write_two_at_once(writer: SectionWriter) -> None:
    with writer.section("a", np.int32, (2,)), writer.section("b", np.int32, (2,)):
        pass


@pytest.mark.parametrize(
    ("misuse", "reason"),
    [
        (add_twice, "'a' was added already"),
        (write_too_much, "given 24 more bytes, .* only 12 are left"),
        (write_too_little, "12 bytes were written, expected 24"),
        (write_another_dtype, "given float32, expected int32"),
        (write_two_at_once, "'a' is not finished yet"),
        (lambda writer: writer.add("", np.arange(3)), "section '': name '', expected 1 to"),
        (lambda writer: writer.add("x" * 256, np.arange(3)), "name 'xxx"),
        (
            lambda writer: writer.add("a", np.arange(3), page_class="gold"),
            "class 'gold', expected one of",
        ),
        (
            lambda writer: writer.section("a", int, (-1,)).__enter__(),
            r"shape '\[-1\]', expected a list of sizes",
        ),
    ],
)
def test_misuse_is_refused_and_leaves_what_was_there(
    tmp_path: Path, misuse: Any, reason: str
) -> None:
    write_sections(tmp_path / "file", {}, {"old": np.arange(5)})
    with (
        pytest.raises(ValueError, match=reason),
        SectionWriter(tmp_path / "file", {}) as writer,
    ):
        misuse(writer)
    assert os.listdir(tmp_path) == ["file"]
    assert SectionFile.open(tmp_path / "file", verify="now").names == ("old",)


@pytest.mark.parametrize("page_bytes", [0, 63, 2**24 + 1, 4096.0, True])
def test_odd_pages_are_refused(tmp_path: Path, page_bytes: Any) -> None:
    with pytest.raises(ValueError, match="page_bytes"):
        SectionWriter(tmp_path / "file", {}, page_bytes=page_bytes)


def test_folders_are_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        SectionWriter(tmp_path / "folder", {})
    with pytest.raises(FileNotFoundError):
        SectionWriter(tmp_path / "missing" / "file", {})


def test_an_open_file_keeps_its_content_when_another_takes_its_place(tmp_path: Path) -> None:
    write_sections(tmp_path / "file", {}, {"a": np.arange(50_000)})
    with SectionFile.open(tmp_path / "file") as old:
        write_sections(tmp_path / "file", {}, {"a": np.zeros(7)})
        assert np.array_equal(old["a"], np.arange(50_000))
    assert SectionFile.open(tmp_path / "file")["a"].tolist() == [0] * 7


def test_what_living_writers_write_is_not_removed(tmp_path: Path) -> None:
    with SectionWriter(tmp_path / "first", {}) as first:
        first.add("a", np.arange(3))
        remove_unfinished(tmp_path)
        with SectionWriter(tmp_path / "second", {}) as second:
            assert len(unfinished(tmp_path)) == 2
            second.add("b", np.arange(4))
        first.add("c", np.arange(5))
    assert SectionFile.open(tmp_path / "first", verify="now").names == ("a", "c")
    assert SectionFile.open(tmp_path / "second", verify="now").names == ("b",)
    assert not unfinished(tmp_path)


def kill_writers(folder: Path, kills: int, seed: int) -> int:
    """Kills writers of one file at random moments; after each, the file is a whole version. Returns
    how many were killed while they wrote."""
    rng = np.random.default_rng(seed)
    path, version, killed, left = folder / "file", -1, 0, 0
    # some machines are so slow that the first do not begin
    while killed < kills or (not left and killed < 20 * kills):
        killed += 1
        writer = start_writer(path, version + 1)
        time.sleep(rng.uniform(0, 0.15))
        writer.kill()
        writer.communicate()
        left += len(unfinished(folder))
        assert len(unfinished(folder)) <= 1, "the next writer removes what the one before has left"
        if not path.exists():
            assert version == -1
            continue
        with SectionFile.open(path, verify="now") as file:
            assert file.header["version"] >= version
            version = file.header["version"]
            for name in file.names:
                assert np.array_equal(file[name], writer_main.section_of(version, name))
    writer_main.write(path, version + 1)
    assert os.listdir(folder) == ["file"]
    return left


def test_killed_writers_leave_a_whole_version(tmp_path: Path) -> None:
    assert kill_writers(tmp_path, 8, seed=0)


@pytest.mark.soak
def test_many_killed_writers_leave_a_whole_version(tmp_path: Path) -> None:
    assert kill_writers(tmp_path, 150, seed=1)


def test_killed_first_writers_leave_nothing_or_a_whole_file(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for number in range(4):
        folder = tmp_path / str(number)
        folder.mkdir()
        writer = start_writer(folder / "file", 0)
        time.sleep(rng.uniform(0, 0.01))
        writer.kill()
        writer.communicate()
        if (folder / "file").exists():
            SectionFile.open(folder / "file", verify="now")
        remove_unfinished(folder)
        assert not unfinished(folder)
