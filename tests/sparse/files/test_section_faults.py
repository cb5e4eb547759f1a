# SPDX-License-Identifier: Apache-2.0
"""A damaged file gives exactly what was written into it, or IndexDamagedError."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.sparse.faults import KINDS, damaged
from vllm_relay.sparse.files.buffer_pool import BufferPool
from vllm_relay.sparse.files.section_file import SectionFile, SectionWriter
from vllm_relay.sparse.files.section_table import FIXED_HEADER_BYTES, decode_fixed_header
from vllm_relay.sparse.index.key_index import IndexDamagedError

HEADER = {"content": "faults", "settings": {"beta": 0.5, "kind": "flat"}}


def arrays_of(version: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(version)
    return {
        "keys": rng.integers(0, 2**16, (900, 32), dtype=np.uint16),
        "values": rng.integers(0, 2**16, (900, 32), dtype=np.uint16),
        "constant": np.zeros(9000, np.float32),
        "adjacency": rng.integers(0, 900, (900, 9), dtype=np.int32),
        "tokens": np.arange(900, dtype=np.int32),
        "none": np.empty((0, 3)),
    }


def write(path: Path, version: int, page_bytes: int | None = 8192) -> bytes:
    with SectionWriter(path, HEADER, page_bytes=page_bytes) as writer:
        for name, array in arrays_of(version).items():
            writer.add(name, array, page_class="values" if name == "values" else "index")
    return path.read_bytes()


def covered_bytes(content: bytes, file: SectionFile) -> np.ndarray:
    """Which bytes of the file mean something: bool [bytes]."""
    fixed = decode_fixed_header(content[:FIXED_HEADER_BYTES], len(content))
    is_covered = np.zeros(len(content), bool)
    is_covered[:FIXED_HEADER_BYTES] = True
    is_covered[fixed.metadata_offset_bytes :] = True
    for section in file.sections.values():
        is_covered[section.offset_bytes : section.offset_bytes + section.num_bytes] = True
        begin, pages = section.checksums_offset_bytes, section.num_pages
        is_covered[begin : begin + 4 * pages] = True
    return is_covered


def read_somehow(path: Path, rng: np.random.Generator) -> bool:
    """Reads in a random way and order; whether damage was reported. Fails if what was read is not
    what was written."""
    expected = arrays_of(1)
    mode = [{}, {"mmap": False}, {"pool": BufferPool(1 << 17)}][rng.integers(3)]
    try:
        with SectionFile.open(path, **mode) as file:
            assert file.header == HEADER
            assert file.names == tuple(expected)
            for name in rng.permutation(list(expected)):
                wanted = expected[name]
                if rng.integers(2):
                    ids = rng.integers(0, len(wanted), 9) if len(wanted) else []
                    assert np.array_equal(file.rows(name).take(ids), wanted[ids])
                if rng.integers(2):
                    begin, end = np.sort(rng.integers(0, len(wanted) + 1, 2)).tolist()
                    assert np.array_equal(file.rows(name).range(begin, end), wanted[begin:end])
                found = file[name]
                assert found.dtype == wanted.dtype and found.shape == wanted.shape
                assert np.array_equal(found, wanted)
            file.verify()
    except IndexDamagedError as error:
        assert str(error).startswith(str(path))
        return True
    return False


def inject(folder: Path, num_faults: int, seed: int) -> dict[str, int]:
    """How many faults of each kind were reported."""
    path = folder / "file"
    stale, content = write(path, 0), write(path, 1)
    with SectionFile.open(path) as file:
        is_covered = covered_bytes(content, file)
        sections = [file.sections[name] for name in ("keys", "values")]
        ranges = [(s.offset_bytes, s.offset_bytes + s.num_bytes) for s in sections]
    reported = dict.fromkeys(KINDS, 0)
    for number in range(num_faults):
        rng = np.random.default_rng([seed, number])
        kind = KINDS[number % len(KINDS)]
        changed = damaged(content, stale, ranges, kind, rng)
        path.write_bytes(changed)
        is_harmful = len(changed) != len(content)
        if not is_harmful:
            differs = np.frombuffer(changed, np.uint8) != np.frombuffer(content, np.uint8)
            is_harmful = bool((differs & is_covered).any())
        was_reported = read_somehow(path, rng)
        assert was_reported == is_harmful, (kind, seed, number)
        reported[kind] += was_reported
    return reported


def test_damaged_files_give_the_arrays_or_an_error(tmp_path: Path) -> None:
    reported = inject(tmp_path, 540, seed=0)
    assert all(reported.values()), reported


@pytest.mark.soak
def test_ten_thousand_faults(tmp_path: Path) -> None:
    reported = inject(tmp_path, 10_000, seed=1)
    assert all(reported.values()), reported


def test_every_truncation_is_refused_when_the_file_is_opened(tmp_path: Path) -> None:
    content = write(tmp_path / "file", 1)
    for length in [*range(0, 200), *range(200, len(content), 997), len(content) - 1]:
        (tmp_path / "file").write_bytes(content[:length])
        with pytest.raises(IndexDamagedError):
            SectionFile.open(tmp_path / "file")


def test_every_byte_of_the_fixed_header_is_checked(tmp_path: Path) -> None:
    content = write(tmp_path / "file", 1)
    for offset_bytes in range(FIXED_HEADER_BYTES):
        header = bytearray(content[:FIXED_HEADER_BYTES])
        header[offset_bytes] ^= 0x10
        with pytest.raises(IndexDamagedError):
            decode_fixed_header(bytes(header), len(content))


def test_a_section_that_is_stale_together_with_its_checksums_is_refused(tmp_path: Path) -> None:
    stale, content = write(tmp_path / "file", 0), bytearray(write(tmp_path / "file", 1))
    section = SectionFile.open(tmp_path / "file").sections["keys"]
    begin, checksums = section.offset_bytes, section.checksums_offset_bytes
    for offset_bytes, num_bytes in ((begin, section.num_bytes), (checksums, 4 * 8)):
        content[offset_bytes : offset_bytes + num_bytes] = stale[offset_bytes:][:num_bytes]
    (tmp_path / "file").write_bytes(content)
    with (
        SectionFile.open(tmp_path / "file") as file,
        pytest.raises(IndexDamagedError, match="page checksums of section 'keys'"),
    ):
        file.rows("keys").take([3])
