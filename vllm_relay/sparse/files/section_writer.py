# SPDX-License-Identifier: Apache-2.0
"""Writes section files: section by section, and published as a whole or not at all."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vllm_relay.sparse.files import section_table as table
from vllm_relay.sparse.files.checksum import bytes_of, checksum_pages, crc32c
from vllm_relay.sparse.files.section_table import Section

WRITE_BYTES = 2 << 20
"""Checksummed while in the processor's cache. The system keeps as a huge page what came as one."""
UNFINISHED_PREFIX, UNFINISHED_SUFFIX = ".relay-", ".unfinished"


def write_sections(
    path: str | Path, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> None:
    """Writes `arrays`, of any shape and a dtype in `section_table.DTYPES`, into one file,
    atomically: `path` holds what it held before, or all of them. `SectionFile.header` gives the
    header back.

    Raises:
        ValueError: header, name or dtype cannot be stored; names it.
        OSError: the folder cannot be written.
    """
    with SectionWriter(path, header) as writer:
        for name, array in arrays.items():
            writer.add(name, array)


class SectionWriter:
    """A section file in the making; sections may be larger than memory.

        with SectionWriter(path, {"content": "..."}) as writer:
            writer.add("tokens", tokens)
            with writer.section("keys", np.uint16, (num_tokens, 128)) as section:
                for part in parts:
                    section.write(part)

    The file appears at `path`, in place of what was there, when the `with` block ends, and not if
    it ends with an error. `header` may be changed until then. Until then it lies in the same folder
    under another name, which a writer that was killed leaves behind and the next one removes. Only
    its owner may read or write it.

    Args:
        page_bytes: what one checksum covers; reading one row verifies that much. None: one row of
            64 to 4,096 bytes; 16 KiB of a section whose rows are of another size.

    Raises:
        ValueError, OSError: as `write_sections`.
    """

    def __init__(
        self, path: str | Path, header: Mapping[str, Any], *, page_bytes: int | None = None
    ) -> None:
        if page_bytes is not None and not table.is_page_bytes(page_bytes):
            raise ValueError(
                f"page_bytes is {page_bytes!r}, expected {table.MIN_PAGE_BYTES} to "
                f"{table.MAX_PAGE_BYTES}"
            )
        table.check_json("header", header)
        self.path = Path(path)
        self.header = dict(header)
        self.page_bytes = page_bytes
        if self.path.is_dir():
            raise IsADirectoryError(f"{self.path} is a folder, expected the name of a file")
        self._sections: list[tuple[Section, np.ndarray]] = []  # with their page checksums
        self._names: set[str] = set()
        self._end_bytes = table.FIXED_HEADER_BYTES
        self._open_section: str | None = None
        remove_unfinished(self.path.parent)
        self._unfinished, self._descriptor = _create_locked(self.path.parent)

    def add(self, name: str, array: np.ndarray, *, page_class: str = "index") -> None:
        """Writes a whole array; `page_class` as for `section`."""
        array = np.asarray(array, order="C")
        dtype = array.dtype.newbyteorder("=")
        with self.section(name, dtype, array.shape, page_class=page_class) as section:
            section.write(array)

    @contextmanager
    def section(
        self, name: str, dtype: Any, shape: tuple[int, ...], *, page_class: str = "index"
    ) -> Iterator[SectionStream]:
        """A section that is written in parts, one section at a time.

        Args:
            page_class: "values", "keys" or "index": what a `BufferPool` lets go of first.
        """
        dtype = np.dtype(dtype)
        shape = tuple(int(size) for size in shape)
        if self._descriptor < 0:
            raise ValueError(f"section {name!r}: {self.path} is written already")
        if self._open_section is not None:
            raise ValueError(f"section {name!r}: {self._open_section!r} is not finished yet")
        if name in self._names:
            raise ValueError(f"section {name!r} was added already")
        known_dtype = dtype.name if dtype == table.DTYPES.get(dtype.name) else str(dtype)
        given = {"name": name, "dtype": known_dtype, "shape": list(shape), "class": page_class}
        for column, value in given.items():
            table.check_entry(name, column, value)
        num_bytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
        offset = _rounded_up(self._end_bytes, table.alignment_bytes(num_bytes))
        page_bytes = self.page_bytes or table.default_page_bytes(dtype, shape)
        section = Section(name, dtype, shape, page_class, page_bytes, offset, 0, 0)
        stream = SectionStream(self._descriptor, section)
        self._open_section = name
        yield stream  # an error goes on to the file's own `with`, which removes it
        self._open_section = None
        self._sections.append((section, stream.finish()))
        self._names.add(name)
        self._end_bytes = offset + num_bytes

    def publish(self) -> None:
        """Ends the file and gives it its name."""
        if self._open_section is not None:
            raise ValueError(f"{self.path}: section {self._open_section!r} is not finished")
        end = _rounded_up(self._end_bytes, table.ALIGNMENT_BYTES)
        sections = []
        for section, checksums in self._sections:
            crc = crc32c(checksums)
            sections.append(replace(section, checksums_offset_bytes=end, checksums_crc=crc))
            write_at(self._descriptor, checksums, end)
            end += checksums.nbytes
        metadata = table.encode_metadata(self.header, sections)
        write_at(self._descriptor, metadata, end)
        if len(metadata) > table.MAX_METADATA_BYTES:
            raise ValueError(
                f"{self.path}: header and section table take {len(metadata)} bytes, expected at "
                f"most {table.MAX_METADATA_BYTES}"
            )
        fixed = table.FixedHeader(end + len(metadata), end, len(metadata), crc32c(metadata))
        write_at(self._descriptor, table.encode_fixed_header(fixed), 0)
        os.fsync(self._descriptor)
        os.replace(self._unfinished, self.path)
        self._close()
        _sync_folder(self.path.parent)

    def abort(self) -> None:
        """Leaves nothing behind; what was at `path` before stays."""
        if self._descriptor >= 0:
            with suppress(FileNotFoundError):
                os.unlink(self._unfinished)
            self._close()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)

    def __enter__(self) -> SectionWriter:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        try:
            if kind is None and self._descriptor >= 0:
                self.publish()
        finally:
            self.abort()


class SectionStream:
    """Takes the bytes of one section in order, in parts of any size."""

    def __init__(self, descriptor: int, section: Section) -> None:
        self._descriptor = descriptor
        self._section = section
        self._written_bytes = 0
        self._checksums = np.empty(section.num_pages, np.uint32)
        self._page_crc = 0  # of what the page that is begun holds so far

    def write(self, part: np.ndarray) -> None:
        """Writes rows that follow, or any other part of the section in C order. Raises ValueError:
        another dtype than the section's, or more than its shape holds."""
        part = np.asarray(part)
        section = self._section
        if part.dtype.newbyteorder("=") != section.dtype:
            raise ValueError(
                f"section {section.name!r}: given {part.dtype}, expected {section.dtype}"
            )
        data = bytes_of(np.asarray(part, section.dtype, order="C"))
        left_bytes = section.num_bytes - self._written_bytes
        if len(data) > left_bytes:
            raise ValueError(
                f"section {section.name!r}: given {len(data)} more bytes, but of shape "
                f"{section.shape} only {left_bytes} are left"
            )
        for begin in range(0, len(data), WRITE_BYTES):
            self._write(data[begin : begin + WRITE_BYTES])

    def _write(self, data: np.ndarray) -> None:
        write_at(self._descriptor, data, self._section.offset_bytes + self._written_bytes)
        page_bytes = self._section.page_bytes
        while len(data):
            page, used_bytes = divmod(self._written_bytes, page_bytes)
            whole = len(data) // page_bytes
            if used_bytes == 0 and whole:
                taken = data[: whole * page_bytes]
                self._checksums[page : page + whole] = checksum_pages(taken, page_bytes)
            else:
                taken = data[: page_bytes - used_bytes]
                self._page_crc = crc32c(taken, self._page_crc if used_bytes else 0)
                self._checksums[page] = self._page_crc
            self._written_bytes += len(taken)
            data = data[len(taken) :]

    def finish(self) -> np.ndarray:
        """The page checksums. Raises ValueError: less was written than the shape holds."""
        if self._written_bytes != self._section.num_bytes:
            raise ValueError(
                f"section {self._section.name!r}: {self._written_bytes} bytes were written, "
                f"expected {self._section.num_bytes} for shape {self._section.shape}"
            )
        return self._checksums


def remove_unfinished(folder: Path) -> None:
    """Removes what killed writers have left in the folder. A living writer holds a lock on its
    file, which ends with the writer, whatever ended it.
    """
    for leftover in folder.glob(f"{UNFINISHED_PREFIX}*{UNFINISHED_SUFFIX}"):
        with suppress(OSError):  # another's file, another cleaner, no locks on this file system
            descriptor = os.open(leftover, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(leftover)
            finally:
                os.close(descriptor)


def write_at(descriptor: int, data: Any, offset_bytes: int) -> None:
    """All of `data`, also where the system takes it in several parts."""
    view = memoryview(data).cast("B") if len(data) else memoryview(b"")
    while len(view):
        written = os.pwrite(descriptor, view, offset_bytes)
        view = view[written:]
        offset_bytes += written


def _create_locked(folder: Path) -> tuple[Path, int]:
    while True:
        path = folder / f"{UNFINISHED_PREFIX}{secrets.token_hex(8)}{UNFINISHED_SUFFIX}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with suppress(OSError):  # without locks nobody can tell that it is left over
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return path, descriptor
        os.close(descriptor)  # a cleaner came between creation and lock


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rounded_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
