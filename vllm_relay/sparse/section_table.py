# SPDX-License-Identifier: Apache-2.0
"""The format of section files: fixed header, section table and their checks (no input, no output).

fixed header        4 KiB; its last 4 bytes are the CRC-32C of the others
sections            each at a multiple of its alignment; holes between them
page checksums      uint32, those of one section after those of another
metadata            JSON: {"header": ..., "sections": [...]}
"""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_relay.sparse.checksum import crc32c
from vllm_relay.sparse.damage import IndexDamagedError

MAGIC = b"RELAYSEC"
FORMAT_VERSION = 1
BYTE_ORDER_MARK = 0x01020304
FIXED_HEADER_BYTES = 4096
ALIGNMENT_BYTES = 4096
LARGE_ALIGNMENT_BYTES = 2 << 20
LARGE_SECTION_BYTES = 8 << 20  # from here on the alignment is that of huge pages
PAGE_BYTES = 16 << 10
MIN_PAGE_BYTES, MAX_PAGE_BYTES = 4096, 16 << 20
MAX_FILE_BYTES = 2**63 - 1
MAX_DIMENSIONS = 32
MAX_NAME_CHARACTERS = 255
MAX_METADATA_BYTES = 1 << 30

DTYPES = {
    np.dtype(name).name: np.dtype(name)
    for name in (
        "bool",
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}
PAGE_CLASSES = ("values", "keys", "index")
"""What a section is to a `BufferPool`, in the order of eviction."""

# magic, byte order, version, bytes of the file, offset and bytes of the metadata, bytes of a page,
# CRC-32C of the metadata
_FIXED = struct.Struct("=8sIIQQQII")


@dataclass(frozen=True)
class Section:
    """Where an array lies in the file, and how to tell whether it is whole.

    Attributes:
        offset_bytes, checksums_offset_bytes: from the beginning of the file.
        checksums_crc: CRC-32C of the section's page checksums.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    page_class: str
    offset_bytes: int
    checksums_offset_bytes: int
    checksums_crc: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Of one entry of the first dimension."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def num_pages(self, page_bytes: int) -> int:
        return -(-self.num_bytes // page_bytes)


@dataclass(frozen=True)
class FixedHeader:
    file_bytes: int
    metadata_offset_bytes: int
    metadata_bytes: int
    page_bytes: int
    metadata_crc: int


def alignment_bytes(num_bytes: int) -> int:
    return LARGE_ALIGNMENT_BYTES if num_bytes >= LARGE_SECTION_BYTES else ALIGNMENT_BYTES


def is_page_bytes(value: object) -> bool:
    return (
        type(value) is int
        and MIN_PAGE_BYTES <= value <= MAX_PAGE_BYTES
        and value & (value - 1) == 0
    )


def encode_fixed_header(fixed: FixedHeader) -> bytes:
    content = _FIXED.pack(
        MAGIC,
        BYTE_ORDER_MARK,
        FORMAT_VERSION,
        fixed.file_bytes,
        fixed.metadata_offset_bytes,
        fixed.metadata_bytes,
        fixed.page_bytes,
        fixed.metadata_crc,
    ).ljust(FIXED_HEADER_BYTES - 4, b"\0")
    return content + struct.pack("=I", crc32c(content))


def decode_fixed_header(data: bytes, file_bytes: int) -> FixedHeader:
    """
    Args:
        data: the first `FIXED_HEADER_BYTES` bytes of the file, or all where there are fewer.
        file_bytes: the size of the file.

    Raises:
        IndexDamagedError: says what was found and expected; the caller names the file.
    """
    if data[: len(MAGIC)] != MAGIC:
        raise IndexDamagedError(
            f"begins with {data[: len(MAGIC)]!r}, expected {MAGIC!r}: not a section file"
        )
    if len(data) < FIXED_HEADER_BYTES:
        raise IndexDamagedError(
            f"{file_bytes} bytes, fewer than the {FIXED_HEADER_BYTES} of the header: truncated"
        )
    _, mark, version, stated_bytes, offset, metadata_bytes, page_bytes, crc = _FIXED.unpack_from(
        data
    )
    if mark != BYTE_ORDER_MARK:
        swapped = int.from_bytes(BYTE_ORDER_MARK.to_bytes(4, "little"), "big")
        raise IndexDamagedError(
            f"written on a machine of the other byte order (this one is {sys.byteorder}-endian)"
            if mark == swapped
            else f"byte order mark {mark:#010x}, expected {BYTE_ORDER_MARK:#010x}"
        )
    if version != FORMAT_VERSION:
        raise IndexDamagedError(
            f"format version {version}, this vllm-relay reads version {FORMAT_VERSION}"
        )
    stored, found = struct.unpack("=I", data[-4:])[0], crc32c(data[:-4])
    if stored != found:
        raise IndexDamagedError(f"fixed header: CRC-32C {found:#010x}, expected {stored:#010x}")
    if stated_bytes != file_bytes:
        what = "truncated" if file_bytes < stated_bytes else "longer than it was written"
        raise IndexDamagedError(f"{file_bytes} bytes, expected {stated_bytes}: {what}")
    if (
        metadata_bytes > MAX_METADATA_BYTES
        or not FIXED_HEADER_BYTES <= offset <= offset + metadata_bytes <= file_bytes
    ):
        raise IndexDamagedError(
            f"metadata of {metadata_bytes} bytes at {offset} in a file of {file_bytes} bytes"
        )
    if not is_page_bytes(page_bytes):
        raise IndexDamagedError(
            f"pages of {page_bytes} bytes, expected a power of two of {MIN_PAGE_BYTES} to "
            f"{MAX_PAGE_BYTES}"
        )
    return FixedHeader(file_bytes, offset, metadata_bytes, page_bytes, crc)


def encode_metadata(header: Mapping[str, Any], sections: list[Section]) -> bytes:
    """
    Raises:
        ValueError: the header is not what JSON can hold.
    """
    check_json("header", header)
    entries = [
        {
            "name": section.name,
            "dtype": section.dtype.name,
            "shape": section.shape,
            "class": section.page_class,
            "offset": section.offset_bytes,
            "bytes": section.num_bytes,
            "checksums": section.checksums_offset_bytes,
            "checksums_crc": section.checksums_crc,
        }
        for section in sections
    ]
    return json.dumps(
        {"header": header, "sections": entries}, sort_keys=True, separators=(",", ":")
    ).encode()


def decode_metadata(data: bytes, fixed: FixedHeader) -> tuple[dict[str, Any], list[Section]]:
    """
    Raises:
        IndexDamagedError: says what was found and expected; the caller names the file.
    """
    found = crc32c(data)
    if found != fixed.metadata_crc:
        raise IndexDamagedError(
            f"metadata: CRC-32C {found:#010x}, expected {fixed.metadata_crc:#010x}"
        )
    try:
        metadata = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise IndexDamagedError(f"metadata: not JSON: {error}") from None
    header = metadata.get("header") if isinstance(metadata, dict) else None
    entries = metadata.get("sections") if isinstance(metadata, dict) else None
    if not isinstance(header, dict) or not isinstance(entries, list):
        raise IndexDamagedError('metadata: expected {"header": {...}, "sections": [...]}')
    sections = [_decode_section(number, entry, fixed) for number, entry in enumerate(entries)]
    if len({section.name for section in sections}) != len(sections):
        raise IndexDamagedError("metadata: two sections of the same name")
    _check_apart(sections, fixed)
    return header, sections


def check_json(name: str, value: Any) -> None:
    """Raises ValueError, naming the place, where JSON would not give back what it is given."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{name}: key {key!r} of type {type(key).__name__}, expected str")
            check_json(f"{name}[{key!r}]", inner)
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            check_json(f"{name}[{number}]", inner)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{name} is {value}, expected a finite number")
    elif value is not None and not isinstance(value, (str, int)):
        raise ValueError(
            f"{name} is a {type(value).__name__}, expected str, int, float, bool, None, list or "
            "dict"
        )


def check_name(name: object) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARACTERS:
        raise ValueError(
            f"section name {name!r}, expected a text of 1 to {MAX_NAME_CHARACTERS} characters"
        )


def _decode_section(number: int, entry: Any, fixed: FixedHeader) -> Section:
    def refuse(what: str) -> IndexDamagedError:
        return IndexDamagedError(f"metadata: section {number}: {what}")

    if not isinstance(entry, dict):
        raise refuse(f"a {type(entry).__name__}, expected a dict")
    name: Any = entry.get("name")
    dtype: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    try:
        check_name(name)
    except ValueError as error:
        raise refuse(str(error)) from None
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise refuse(f"dtype {dtype!r}, expected one of {', '.join(DTYPES)}")
    if (
        not isinstance(shape, list)
        or len(shape) > MAX_DIMENSIONS
        or not all(_is_count(size) for size in shape)
        or math.prod(size for size in shape if size) > MAX_FILE_BYTES // DTYPES[dtype].itemsize
    ):
        raise refuse(f"shape {str(shape)[:200]}, expected a list of sizes that fit in memory")
    if entry.get("class") not in PAGE_CLASSES:
        raise refuse(f"class {entry.get('class')!r}, expected one of {', '.join(PAGE_CLASSES)}")
    numbers: list[Any] = [entry.get(key) for key in ("offset", "checksums", "checksums_crc")]
    if not all(_is_count(value) for value in numbers) or numbers[2] >= 2**32:
        raise refuse(f"offsets and checksum {numbers}, expected whole numbers")
    section = Section(name, DTYPES[dtype], tuple(shape), entry["class"], *numbers)
    if entry.get("bytes") != section.num_bytes:
        raise refuse(f"{entry.get('bytes')!r} bytes, expected {section.num_bytes}")
    if section.offset_bytes % ALIGNMENT_BYTES or section.checksums_offset_bytes % 4:
        raise refuse(f"offsets {numbers[:2]}, expected multiples of {ALIGNMENT_BYTES} and of 4")
    return section


def _check_apart(sections: list[Section], fixed: FixedHeader) -> None:
    """Everything lies between fixed header and metadata, and nothing on anything else."""
    areas = [(0, FIXED_HEADER_BYTES, "the fixed header")]
    for section in sections:
        checksum_bytes = 4 * section.num_pages(fixed.page_bytes)
        areas.append((section.offset_bytes, section.num_bytes, section.name))
        areas.append(
            (section.checksums_offset_bytes, checksum_bytes, f"checksums of {section.name}")
        )
    areas.append((fixed.metadata_offset_bytes, fixed.metadata_bytes, "the metadata"))
    areas.sort(key=lambda area: area[:2])
    end, before = 0, ""
    for offset, num_bytes, name in areas:
        if offset < end:
            raise IndexDamagedError(f"metadata: {name} at {offset} lies on {before}")
        end, before = offset + num_bytes, name
    if end > fixed.file_bytes:
        raise IndexDamagedError(
            f"metadata: {before} ends at {end}, the file has {fixed.file_bytes} bytes"
        )


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_FILE_BYTES
