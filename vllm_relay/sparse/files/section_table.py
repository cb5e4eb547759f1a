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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from typing import Any, TypeGuard

import numpy as np

from vllm_relay.sparse.files.checksum import crc32c
from vllm_relay.sparse.files.damage import IndexDamagedError

MAGIC = b"RELAYSEC"
FORMAT_VERSION = 2
BYTE_ORDER_MARK = 0x01020304
FIXED_HEADER_BYTES = 4096
ALIGNMENT_BYTES = 4096
LARGE_ALIGNMENT_BYTES = 2 << 20
LARGE_SECTION_BYTES = 8 << 20  # from here on the alignment is that of huge pages
PAGE_BYTES = 16 << 10
MIN_PAGE_BYTES, MAX_PAGE_BYTES = 64, 16 << 20
MAX_ROW_PAGE_BYTES = 4096
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

_MAX_ITEM_BYTES = max(dtype.itemsize for dtype in DTYPES.values())

# magic, byte order, version, bytes of the file, offset and bytes of the metadata, its CRC-32C
_FIXED = struct.Struct("=8sIIQQQI")


def is_page_bytes(value: object) -> bool:
    return type(value) is int and MIN_PAGE_BYTES <= value <= MAX_PAGE_BYTES


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= MAX_FILE_BYTES


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_NAME_CHARACTERS


def _is_shape(value: object) -> bool:
    if not isinstance(value, list) or len(value) > MAX_DIMENSIONS:
        return False
    product = 1
    for size in value:
        if not _is_count(size):
            return False
        product *= size or 1
    return product <= MAX_FILE_BYTES // _MAX_ITEM_BYTES


# of the table, in the order of the fields of `Section`: what an entry may be
_COLUMNS: dict[str, tuple[Callable[[object], bool], str]] = {
    "name": (_is_name, f"1 to {MAX_NAME_CHARACTERS} characters"),
    "dtype": (lambda x: isinstance(x, str) and x in DTYPES, f"one of {', '.join(DTYPES)}"),
    "shape": (_is_shape, "a list of sizes that fit in memory"),
    "class": (lambda x: x in PAGE_CLASSES, f"one of {', '.join(PAGE_CLASSES)}"),
    "page": (is_page_bytes, f"{MIN_PAGE_BYTES} to {MAX_PAGE_BYTES} bytes"),
    "offset": (
        lambda x: _is_count(x) and x % ALIGNMENT_BYTES == 0,
        f"a multiple of {ALIGNMENT_BYTES}",
    ),
    "checksums": (lambda x: _is_count(x) and x % 4 == 0, "a multiple of 4"),
    "checksums_crc": (lambda x: type(x) is int and 0 <= x < 2**32, "32 bits"),
}


@dataclass(frozen=True)
class Section:
    """Where an array lies in the file, and how to tell whether it is whole: `page_bytes` is what
    one checksum covers, `checksums_crc` the CRC-32C of the section's page checksums."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    page_class: str
    page_bytes: int
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

    @property
    def num_pages(self) -> int:
        return -(-self.num_bytes // self.page_bytes)

    @property
    def block_bytes(self) -> int:
        """What a `BufferPool` reads at once: whole pages, about `PAGE_BYTES`."""
        return max(1, PAGE_BYTES // self.page_bytes) * self.page_bytes

    @property
    def has_row_pages(self) -> bool:
        """Whether each row is a page of its own."""
        return len(self.shape) > 1 and self.row_bytes == self.page_bytes


@dataclass(frozen=True)
class FixedHeader:
    file_bytes: int
    metadata_offset_bytes: int
    metadata_bytes: int
    metadata_crc: int


def alignment_bytes(num_bytes: int) -> int:
    return LARGE_ALIGNMENT_BYTES if num_bytes >= LARGE_SECTION_BYTES else ALIGNMENT_BYTES


def default_page_bytes(dtype: np.dtype, shape: tuple[int, ...]) -> int:
    """A row where rows are of a size to be read one by one, else `PAGE_BYTES`."""
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    if len(shape) > 1 and MIN_PAGE_BYTES <= row_bytes <= MAX_ROW_PAGE_BYTES:
        return row_bytes
    return PAGE_BYTES


def encode_fixed_header(fixed: FixedHeader) -> bytes:
    content = _FIXED.pack(MAGIC, BYTE_ORDER_MARK, FORMAT_VERSION, *astuple(fixed))
    content = content.ljust(FIXED_HEADER_BYTES - 4, b"\0")
    return content + struct.pack("=I", crc32c(content))


def decode_fixed_header(data: bytes, file_bytes: int) -> FixedHeader:
    """Args: data: the first `FIXED_HEADER_BYTES` bytes of a file of `file_bytes`, or all where
    there are fewer. Raises IndexDamagedError: what was found and expected; the caller names the
    file."""
    if data[: len(MAGIC)] != MAGIC:
        raise IndexDamagedError(
            f"begins with {data[: len(MAGIC)]!r}, expected {MAGIC!r}: not a section file"
        )
    if len(data) < FIXED_HEADER_BYTES:
        raise IndexDamagedError(
            f"{file_bytes} bytes, fewer than the {FIXED_HEADER_BYTES} of the header: truncated"
        )
    _, mark, version, stated_bytes, offset, metadata_bytes, crc = _FIXED.unpack_from(data)
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
    return FixedHeader(file_bytes, offset, metadata_bytes, crc)


def encode_metadata(header: Mapping[str, Any], sections: list[Section]) -> bytes:
    """Raises ValueError: the header is not what JSON can hold."""
    check_json("header", header)
    entries = [astuple(section) for section in sections]
    columns = {name: [entry[i] for entry in entries] for i, name in enumerate(_COLUMNS)}
    columns["dtype"] = [section.dtype.name for section in sections]
    return json.dumps(
        {"header": header, "sections": columns}, sort_keys=True, separators=(",", ":")
    ).encode()


def decode_metadata(
    data: bytes, fixed: FixedHeader
) -> tuple[dict[str, Any], Mapping[str, Section]]:
    """Raises IndexDamagedError: says what was found and expected; the caller names the file."""
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
    columns = metadata.get("sections") if isinstance(metadata, dict) else None
    if not isinstance(header, dict) or not isinstance(columns, dict):
        raise IndexDamagedError('metadata: expected {"header": {...}, "sections": {...}}')
    return header, SectionTable(columns, fixed)


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


def check_entry(section: object, column: str, value: object) -> None:
    """Raises ValueError: the table cannot hold it."""
    is_good, expected = _COLUMNS[column]
    if not is_good(value):
        raise ValueError(f"section {section!r}: {column} {str(value)[:200]!r}, expected {expected}")


class SectionTable(Mapping[str, Section]):
    """The sections of a file by name, in the order they were written. A context has thousands: they
    are checked column by column, and made when they are asked for. Raises IndexDamagedError: a
    column is missing, an entry unusable, or two sections overlap."""

    def __init__(self, columns: dict[str, Any], fixed: FixedHeader) -> None:
        lists: list[list[Any]] = []
        for column, (is_good, expected) in _COLUMNS.items():
            entries = columns.get(column)
            if not isinstance(entries, list):
                raise IndexDamagedError(f"metadata: sections: no list {column!r}")
            if not all(map(is_good, entries)):
                number, bad = next((i, x) for i, x in enumerate(entries) if not is_good(x))
                raise IndexDamagedError(
                    f"metadata: section {number}: {column} {str(bad)[:200]!r}, expected {expected}"
                )
            lists.append(entries)
        if len({len(entries) for entries in lists}) > 1:
            raise IndexDamagedError(
                f"metadata: sections: lists of {[len(entries) for entries in lists]} entries"
            )
        names, dtypes, shapes, _, pages, offsets, checksums, _ = lists
        self._columns = lists
        self._number = {name: number for number, name in enumerate(names)}
        if len(self._number) < len(names):
            raise IndexDamagedError("metadata: two sections of the same name")
        sizes = [
            math.prod(shape) * DTYPES[dtype].itemsize
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        _check_apart(names, pages, offsets, checksums, sizes, fixed)

    def __getitem__(self, name: str) -> Section:
        number = self._number[name]
        name, dtype, shape, *rest = [column[number] for column in self._columns]
        return Section(name, DTYPES[dtype], tuple(shape), *rest)

    def __contains__(self, name: object) -> bool:
        return name in self._number

    def __iter__(self) -> Iterator[str]:
        return iter(self._number)

    def __len__(self) -> int:
        return len(self._number)


def _check_apart(
    names: list[str],
    pages: list[int],
    offsets: list[int],
    checksums: list[int],
    sizes: list[int],
    fixed: FixedHeader,
) -> None:
    """Everything lies between fixed header and metadata, and nothing on anything else."""

    def described(area: int) -> str:
        if area < len(names):
            return names[area]
        area -= len(names)
        if area < len(names):
            return f"checksums of {names[area]}"
        return ("the fixed header", "the metadata")[area - len(names)]

    checksum_sizes = [4 * -(-size // page) for size, page in zip(sizes, pages, strict=True)]
    begins: Iterable[int] = [*offsets, *checksums, 0, fixed.metadata_offset_bytes]
    lengths = [*sizes, *checksum_sizes, FIXED_HEADER_BYTES, fixed.metadata_bytes]
    areas = sorted(zip(begins, lengths, range(len(lengths)), strict=True))
    end, before = 0, 0
    for begin, num_bytes, area in areas:
        if begin < end:
            raise IndexDamagedError(
                f"metadata: {described(area)} at {begin} lies on {described(before)}"
            )
        end, before = begin + num_bytes, area
    if end > fixed.file_bytes:
        raise IndexDamagedError(
            f"metadata: {described(before)} ends at {end}, the file has {fixed.file_bytes} bytes"
        )
