# SPDX-License-Identifier: Apache-2.0
"""Headers and tables whose checksums are right and whose content is not."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.depth import cases
from vllm_relay.sparse.files.checksum import crc32c
from vllm_relay.sparse.files.section_file import SectionFile, write_sections
from vllm_relay.sparse.files.section_table import (
    ALIGNMENT_BYTES,
    LARGE_ALIGNMENT_BYTES,
    LARGE_SECTION_BYTES,
    decode_fixed_header,
)
from vllm_relay.sparse.index.key_index import IndexDamagedError

ARRAYS = {"a": np.arange(2000), "b": np.arange(2000)[::-1].copy()}


def written(folder: Path) -> bytearray:
    write_sections(folder / "file", {"number": 1}, ARRAYS)
    return bytearray((folder / "file").read_bytes())


def with_metadata(content: bytes, metadata: bytes) -> bytes:
    """The file with other metadata and checksums that fit."""
    offset = decode_fixed_header(content[:4096], len(content)).metadata_offset_bytes
    head = bytearray(content[:4092])
    struct.pack_into("=QQQ", head, 16, offset + len(metadata), offset, len(metadata))
    struct.pack_into("=I", head, 40, crc32c(metadata))
    return bytes(head) + struct.pack("=I", crc32c(head)) + content[4096:offset] + metadata


def metadata_of(content: bytes) -> dict[str, Any]:
    fixed = decode_fixed_header(content[:4096], len(content))
    return json.loads(content[fixed.metadata_offset_bytes :])


def refused(folder: Path, content: bytes) -> str:
    (folder / "file").write_bytes(content)
    with pytest.raises(IndexDamagedError) as caught:
        SectionFile.open(folder / "file")
    return str(caught.value)


def test_metadata_with_right_checksums_is_read(tmp_path: Path) -> None:
    content = written(tmp_path)
    metadata = metadata_of(content) | {"header": {"number": 2}}
    (tmp_path / "file").write_bytes(with_metadata(content, json.dumps(metadata).encode()))
    with SectionFile.open(tmp_path / "file", verify="now") as file:
        assert file.header == {"number": 2}
        assert np.array_equal(file["b"], ARRAYS["b"])


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("name", "", "name '', expected 1 to 255"),
        ("name", 3, "name '3'"),
        ("name", "b", "two sections of the same name"),
        ("dtype", "object", "dtype 'object'"),
        ("dtype", "V8", "dtype 'V8'"),
        ("dtype", None, "dtype 'None'"),
        ("shape", [-2000], "shape"),
        ("shape", [2000.0], "shape"),
        ("shape", [True], "shape"),
        ("shape", 2000, "shape"),
        ("shape", [2**70], "shape"),
        ("shape", [2**40, 2**40], "shape"),
        ("shape", [0, 2**62, 2**62], "shape"),
        ("shape", [1] * 40, "shape"),
        ("shape", [2**50], "lies on"),
        ("page", 63, "page '63', expected 64 to 16777216 bytes"),
        ("page", 2**24 + 1, "page"),
        ("page", 64.0, "page"),
        ("page", None, "page"),
        ("page", 64, "lies on checksums of a"),
        ("class", "gold", "class 'gold'"),
        ("class", ["keys"], "class"),
        ("offset", 0, "lies on the fixed header"),
        ("offset", -4096, "multiple of 4096"),
        ("offset", 4097, "multiple of 4096"),
        ("offset", 2**80, "multiple of 4096"),
        ("offset", 2**62, "the file has"),
        ("offset", 20480, "lies on"),
        ("checksums", 1, "multiple of 4"),
        ("checksums", 4096, "lies on"),
        ("checksums", 2**62, "the file has"),
        ("checksums_crc", 2**32, "32 bits"),
        ("checksums_crc", None, "32 bits"),
    ],
)
def test_absurd_sections_are_refused(tmp_path: Path, field: str, value: Any, reason: str) -> None:
    content = written(tmp_path)
    metadata = metadata_of(content)
    metadata["sections"][field][0] = value
    assert reason in refused(tmp_path, with_metadata(content, json.dumps(metadata).encode()))


def test_a_section_just_behind_the_end_of_the_file_is_refused(tmp_path: Path) -> None:
    content = written(tmp_path)
    metadata = metadata_of(content)
    metadata["sections"]["offset"][0] = -(-len(content) // 4096) * 4096
    reason = refused(tmp_path, with_metadata(content, json.dumps(metadata).encode()))
    assert "a ends at" in reason and "the file has" in reason


@pytest.mark.parametrize(
    "metadata",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"header": {}}',
        b'{"header": [], "sections": {}}',
        b'{"header": {}, "sections": {}}',
        b'{"header": {}, "sections": [1]}',
        b'{"header": {}, "sections": {"name": ["a"], "dtype": "int8"}}',
        b"[" * 100_000,
        b'{"header": {"a": ' + b"9" * 10_000 + b'}, "sections": []}',
    ],
)
def test_metadata_that_is_no_table_is_refused(tmp_path: Path, metadata: bytes) -> None:
    assert "metadata" in refused(tmp_path, with_metadata(written(tmp_path), metadata))


@settings(max_examples=cases(50), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.lists(
        st.tuples(
            st.integers(0, 1),
            st.sampled_from(
                ["name", "dtype", "shape", "class", "page", "offset", "checksums", "checksums_crc"]
            ),
            st.one_of(
                st.none(),
                st.integers(-(2**70), 2**70),
                st.integers(0, 60).map(lambda page: page * 4096),
                st.sampled_from(["a", "int32", "float64", "keys"]),
                st.lists(st.integers(-1, 2**33), max_size=4),
            ),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_any_table_gives_the_arrays_or_is_refused(tmp_path: Path, changes: list) -> None:
    content = written(tmp_path)
    metadata = metadata_of(content)
    for section, field, value in changes:
        metadata["sections"][field][section] = value
    changed = with_metadata(content, json.dumps(metadata).encode())
    (tmp_path / "file").write_bytes(changed)
    try:
        with SectionFile.open(tmp_path / "file", verify="now") as file:
            found = [file[name].tobytes() for name in file.names]
    except IndexDamagedError:
        return
    # names, classes and dtypes may be others, bytes may not; a section may have become empty
    wanted = [array.tobytes() for array in ARRAYS.values()]
    assert all(each in (b"", expected) for each, expected in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    ("offset_bytes", "value", "reason"),
    [
        (0, b"RELAYSEK", "not a section file"),
        (8, struct.pack("=I", 0x04030201), "other byte order"),
        (8, struct.pack("=I", 0x04030202), "byte order mark"),
        (12, struct.pack("=I", 1), "format version 1, this vllm-relay reads version 2"),
        (12, struct.pack("=I", 0), "format version 0"),
        (16, struct.pack("=Q", 2**63), "truncated"),
        (16, struct.pack("=Q", 5000), "longer than it was written"),
        (24, struct.pack("=Q", 2**64 - 1), "metadata of"),
        (32, struct.pack("=Q", 2**64 - 1), "metadata of"),
        (40, struct.pack("=I", 0), "metadata: CRC-32C"),
    ],
)
def test_absurd_fixed_headers_are_refused(
    tmp_path: Path, offset_bytes: int, value: bytes, reason: str
) -> None:
    content = written(tmp_path)
    content[offset_bytes : offset_bytes + len(value)] = value
    content[4092:4096] = struct.pack("=I", crc32c(content[:4092]))
    assert reason in refused(tmp_path, content)


def test_sections_are_aligned(tmp_path: Path) -> None:
    large = np.zeros(LARGE_SECTION_BYTES, np.uint8)
    write_sections(tmp_path / "file", {}, {"a": np.arange(3), "large": large, "b": np.arange(3)})
    with SectionFile.open(tmp_path / "file") as file:
        for section in file.sections.values():
            assert section.offset_bytes % ALIGNMENT_BYTES == 0
        assert file.sections["large"].offset_bytes % LARGE_ALIGNMENT_BYTES == 0
        assert np.array_equal(file["b"], np.arange(3))
