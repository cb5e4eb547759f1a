# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from tests.support.depth import cases
from vllm_relay.sparse.files.buffer_pool import BufferPool
from vllm_relay.sparse.files.section_file import SectionFile, SectionWriter, write_sections
from vllm_relay.sparse.files.section_table import DTYPES, PAGE_BYTES
from vllm_relay.sparse.index.key_index import IndexDamagedError

RNG = np.random.default_rng(0)
TABLE = RNG.integers(0, 2**16, (3000, 37), dtype=np.uint16)  # rows of 74 bytes lie across pages
ARRAYS = {"table": TABLE, "scalar": np.array(2.5), "none": np.empty((0, 4), np.float32)}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False).filter(
        lambda value: abs(value) != float("inf")
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
arrays = st.sampled_from(sorted(DTYPES)).flatmap(
    lambda dtype: npst.arrays(dtype, npst.array_shapes(min_dims=0, min_side=0, max_side=7))
)


def modes() -> list[dict[str, Any]]:
    return [{}, {"mmap": False}, {"pool": BufferPool(1 << 20)}]


def mode_name(mode: dict[str, Any]) -> str:
    return next(iter(mode), "mapped")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_sections(tmp_path / "file", {"content": "test"}, ARRAYS)
    return tmp_path / "file"


def flip(path: Path, offset_bytes: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset_bytes)
        value = file.read(1)[0]
        file.seek(offset_bytes)
        file.write(bytes([value ^ 1]))


def assert_same(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.dtype == expected.dtype.newbyteorder("=")
    assert found.shape == expected.shape
    assert found.tobytes() == expected.astype(found.dtype).tobytes()
    assert not found.flags.writeable


@settings(max_examples=cases(15), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    header=st.dictionaries(st.text(), json_values, max_size=4),
    contents=st.dictionaries(st.text(min_size=1, max_size=9), arrays, max_size=5),
)
def test_round_trip(tmp_path: Path, header: dict, contents: dict[str, np.ndarray]) -> None:
    write_sections(tmp_path / "file", header, contents)
    for mode in modes():
        with SectionFile.open(tmp_path / "file", verify="now", **mode) as file:
            assert file.header == header
            assert file.names == tuple(contents)
            for name, array in contents.items():
                assert_same(file[name], array)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12).reshape(3, 4).T,
        np.arange(20)[::-3],
        np.arange(5, dtype=">i4"),
        np.asfortranarray(np.ones((3, 5), ">f8")),
    ],
)
def test_any_memory_layout_is_taken(tmp_path: Path, array: np.ndarray) -> None:
    write_sections(tmp_path / "file", {}, {"array": array})
    with SectionFile.open(tmp_path / "file") as file:
        assert_same(file["array"], array)


@pytest.mark.parametrize("mode", modes(), ids=mode_name)
def test_arrays_and_rows_outlive_the_file(path: Path, mode: dict[str, Any]) -> None:
    with SectionFile.open(path, **mode) as file:
        table, rows = file["table"][5:], file.rows("table")
    del file
    path.unlink()
    gc.collect()
    assert np.array_equal(table, TABLE[5:])
    assert np.array_equal(rows.take([2999, 0]), TABLE[[2999, 0]])


def test_nothing_stays_open_when_the_last_array_is_gone(path: Path) -> None:
    def open_files() -> int:
        return sum(os.path.realpath(f"/proc/self/fd/{fd}") == str(path.resolve())
                   for fd in os.listdir("/proc/self/fd"))  # fmt: skip

    with SectionFile.open(path) as file:
        table = file["table"]
        assert open_files() > 0
    del file
    gc.collect()
    assert str(path) in Path("/proc/self/maps").read_text()
    assert table.sum() == TABLE.sum()
    del table
    gc.collect()
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert open_files() == 0


@pytest.mark.parametrize("mode", modes(), ids=mode_name)
@settings(max_examples=cases(10), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ids=st.lists(st.integers(0, len(TABLE) - 1), max_size=40),
    ends=st.tuples(st.integers(0, len(TABLE)), st.integers(0, len(TABLE))),
)
def test_rows_are_those_of_the_array(
    path: Path, mode: dict[str, Any], ids: list[int], ends: tuple[int, int]
) -> None:
    begin, end = sorted(ends)
    with SectionFile.open(path, **mode) as file:
        rows = file.rows("table")
        assert (len(rows), rows.shape, rows.dtype) == (len(TABLE), TABLE.shape, TABLE.dtype)
        assert np.array_equal(rows.take(ids), TABLE[ids])
        assert np.array_equal(rows.range(begin, end), TABLE[begin:end])


@pytest.mark.parametrize("mode", modes(), ids=mode_name)
def test_rows_longer_than_pages(tmp_path: Path, mode: dict[str, Any]) -> None:
    array = RNG.random((7, 5000)).astype(np.float32)
    write_sections(tmp_path / "file", {}, {"array": array})
    with SectionFile.open(tmp_path / "file", **mode) as file:
        assert np.array_equal(file.rows("array").take([6, 1, 1]), array[[6, 1, 1]])
        assert np.array_equal(file.rows("array").range(2, 5), array[2:5])


@pytest.mark.parametrize("mode", modes(), ids=mode_name)
def test_rows_without_bytes(tmp_path: Path, mode: dict[str, Any]) -> None:
    write_sections(tmp_path / "file", {}, {"none": np.empty((0, 4)), "thin": np.empty((3, 0))})
    with SectionFile.open(tmp_path / "file", **mode) as file:
        assert file.rows("none").take([]).shape == (0, 4)
        assert file.rows("none").range(0, 0).shape == (0, 4)
        assert file.rows("thin").take([2, 0]).shape == (2, 0)
        assert file.rows("thin").range(1, 3).shape == (2, 0)


@pytest.mark.parametrize("mode", modes(), ids=mode_name)
def test_only_the_pages_of_the_rows_are_verified(tmp_path: Path, mode: dict[str, Any]) -> None:
    path = tmp_path / "file"
    with SectionWriter(path, {}, page_bytes=PAGE_BYTES) as writer:
        writer.add("table", TABLE)
    section_offset = SectionFile.open(path).sections["table"].offset_bytes
    damaged_row = 2 * PAGE_BYTES // 74 + 30
    flip(path, section_offset + damaged_row * 74)
    with SectionFile.open(path, **mode) as file:
        file.rows("table").verify_ids([0, 399, 2999])
        assert np.array_equal(file.rows("table").take([2999, 3]), TABLE[[2999, 3]])
        assert np.array_equal(file.rows("table").range(0, 400), TABLE[:400])
        match = rf"{path}: section 'table', page 2 of 14 .*CRC-32C 0x\w+, expected 0x\w+"
        for touch in (
            lambda: file.rows("table").take([5, damaged_row - 3]),
            lambda: file.rows("table").range(damaged_row - 3, damaged_row),
            lambda: file["table"],
            file.verify,
        ):
            with pytest.raises(IndexDamagedError, match=match):
                touch()


def test_unverified_rows_are_verified_by_their_ids(path: Path) -> None:
    flip(path, SectionFile.open(path).sections["table"].offset_bytes + 700 * 74)
    with SectionFile.open(path) as file:
        rows = file.rows("table")
        assert (rows.unverified() != TABLE).sum() == 1
        rows.verify_ids([699, 701])
        with pytest.raises(IndexDamagedError, match="page 700 of 3000"):
            rows.verify_ids([0, 700])


@pytest.mark.parametrize("mode", modes(), ids=mode_name)
def test_unverified_rows_of_a_whole_file_are_its_rows(path: Path, mode: dict[str, Any]) -> None:
    with SectionFile.open(path, **mode) as file:
        assert_same(file.rows("table").unverified(), TABLE)


def test_verify_sees_damage_that_came_after_the_first_touch(path: Path) -> None:
    file = SectionFile.open(path)
    assert np.array_equal(file["table"], TABLE)
    file.verify()
    flip(path, file.sections["table"].offset_bytes)
    with pytest.raises(IndexDamagedError, match="section 'table', page 0"):
        file.verify()


def test_verify_names_every_damaged_section(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_sections(path, {}, {name: np.arange(9) for name in "abc"})
    for name in "ac":
        flip(path, SectionFile.open(path).sections[name].offset_bytes)
    with pytest.raises(IndexDamagedError) as caught:
        SectionFile.open(path, verify="now")
    assert "section 'a'" in str(caught.value) and "section 'c'" in str(caught.value)
    assert "section 'b'" not in str(caught.value)


TRUNCATE = """
import os, sys
from vllm_relay.sparse.index.key_index import IndexDamagedError
from vllm_relay.sparse.files.section_file import SectionFile
file = SectionFile.open(sys.argv[1])
rows = file.rows("table")
rows.take([0])
os.truncate(sys.argv[1], 2 * 4096)
for touch in (lambda: rows.take([0, 2999]), lambda: file["table"], file.verify):
    try:
        touch()
    except IndexDamagedError as error:
        assert "truncated" in str(error), error
    else:
        sys.exit("nothing was noticed")
"""


def test_a_file_that_shrinks_while_mapped_is_noticed_at_the_next_page(path: Path) -> None:
    release = tuple(int(part) for part in os.uname().release.split(".")[:2])
    if release < (5, 14):
        pytest.skip("this kernel cannot say it")
    done = subprocess.run([sys.executable, "-c", TRUNCATE, str(path)], capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("mode", modes()[1:], ids=mode_name)
def test_a_file_that_shrinks_while_open_is_noticed(path: Path, mode: dict[str, Any]) -> None:
    file = SectionFile.open(path, **mode)
    os.truncate(path, 5000)
    with pytest.raises(IndexDamagedError, match="truncated while open"):
        file["table"]
    with pytest.raises(IndexDamagedError, match="truncated while open"):
        file.rows("table").take([2999])


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a section file"),
        (b"RELAY", "not a section file"),
        (b"RELAYSEC", "truncated"),
        (b"\x7fELF" + bytes(9000), "not a section file"),
        (bytes(9000), "not a section file"),
    ],
)
def test_foreign_files_are_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(IndexDamagedError, match=f"{tmp_path}/file: .*{reason}"):
        SectionFile.open(tmp_path / "file")


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(IndexDamagedError, match="not a regular file"):
            SectionFile.open(path)
    with pytest.raises(FileNotFoundError):
        SectionFile.open(tmp_path / "missing")


def test_wrong_arguments_are_refused(path: Path) -> None:
    with pytest.raises(ValueError, match="'never'"):
        SectionFile.open(path, verify="never")
    file = SectionFile.open(path)
    with pytest.raises(KeyError, match="no section 'tabel', it has table"):
        file["tabel"]
    with pytest.raises(ValueError, match="no dimensions"):
        file.rows("scalar")
    rows = file.rows("table")
    for ids in ([-1], [3000], [0, 2**40]):
        with pytest.raises(IndexError, match="of 3000"):
            rows.take(ids)
        with pytest.raises(IndexError, match="of 3000"):
            rows.verify_ids(ids)
    for ids in ([0.5], [[1]], [True]):
        with pytest.raises(ValueError, match="whole numbers"):
            rows.take(ids)
    for begin, end in ((-1, 3), (4, 3), (0, 3001)):
        with pytest.raises(IndexError, match=f"rows {begin} to {end} of 3000"):
            rows.range(begin, end)
    file.close()
    with pytest.raises(ValueError, match="is closed"):
        file["table"]


@pytest.mark.parametrize("mode", modes(), ids=mode_name)
def test_many_threads_read_the_same(tmp_path: Path, mode: dict[str, Any]) -> None:
    if "pool" in mode:
        mode = {"pool": BufferPool(6 * 4096)}  # of 55 pages
    with SectionWriter(tmp_path / "file", {}, page_bytes=4096) as writer:
        writer.add("table", TABLE, page_class="values")
    file = SectionFile.open(tmp_path / "file", **mode)
    failures: list[BaseException] = []

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(30):
                ids = rng.integers(0, len(TABLE), 20)
                assert np.array_equal(file.rows("table").take(ids), TABLE[ids])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
