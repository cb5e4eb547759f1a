# SPDX-License-Identifier: Apache-2.0
"""Three ways to the bytes of a section file: mapped, read into memory, through a buffer pool.

All of them hand out verified bytes only, except `unverified`.
"""

from __future__ import annotations

import mmap
import os
import weakref
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from threading import Lock

import numpy as np

from vllm_relay._C import PageGuard
from vllm_relay.sparse.files.aligned import aligned_empty
from vllm_relay.sparse.files.buffer_pool import BufferPool
from vllm_relay.sparse.files.checksum import crc32c, find_damage
from vllm_relay.sparse.files.damage import IndexDamagedError
from vllm_relay.sparse.files.section_table import LARGE_SECTION_BYTES, Section

READ_BYTES = 1 << 20
MAX_READ_BYTES = 1 << 30  # Linux reads less than 2 GiB at once


# what is mapped together: of indexes a search touches nearly all, of keys and values a few rows
_AROUND_BYTES = {"index": 64 << 10, "keys": mmap.PAGESIZE, "values": mmap.PAGESIZE}


class OpenFile:
    """A file that stays open until the last user lets go of it.

    Attributes:
        is_own: this process owns it or may write to it: the system tells what of it is in memory.
    """

    def __init__(self, path: Path, descriptor: int, num_bytes: int) -> None:
        self.path = path
        self.num_bytes = num_bytes
        self.descriptor = descriptor
        is_owner = os.fstat(descriptor).st_uid == os.geteuid()
        self.is_own = is_owner or os.access(path, os.W_OK)
        weakref.finalize(self, os.close, descriptor)

    def check_size(self) -> None:
        """Raises IndexDamagedError where mapped bytes are no longer there."""
        num_bytes = os.fstat(self.descriptor).st_size
        if num_bytes < self.num_bytes:
            raise IndexDamagedError(
                f"{self.path}: {num_bytes} bytes, expected {self.num_bytes}: it was truncated "
                "while open"
            )

    def read_into(self, buffer: memoryview, offset_bytes: int) -> None:
        """
        Raises:
            IndexDamagedError: the disk cannot read it, or the file ends before.
        """
        while len(buffer):
            try:
                count = os.preadv(self.descriptor, [buffer[:MAX_READ_BYTES]], offset_bytes)
            except OSError as error:
                raise IndexDamagedError(
                    f"{self.path}: {len(buffer)} bytes at {offset_bytes} cannot be read: {error}"
                ) from error
            if count == 0:
                raise IndexDamagedError(
                    f"{self.path}: ends at {offset_bytes}, expected {self.num_bytes} bytes: it was "
                    "truncated while open"
                )
            buffer = buffer[count:]
            offset_bytes += count

    def read(self, offset_bytes: int, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        self.read_into(memoryview(data), offset_bytes)
        return data


class SectionReader(ABC):
    """The sections of one open file; bytes are uint8 arrays. For any number of threads."""

    def __init__(self, file: OpenFile) -> None:
        self.file = file
        self._checksums: dict[str, np.ndarray] = {}

    @abstractmethod
    def whole(self, section: Section) -> np.ndarray:
        """Read-only [num_bytes]."""

    @abstractmethod
    def unverified(self, section: Section) -> np.ndarray:
        """Read-only [num_bytes], as cheaply as there is; perhaps not verified."""

    @abstractmethod
    def verify_pages(self, section: Section, pages: np.ndarray) -> None:
        """Makes sure that these pages (int64) of what `unverified` gives are whole."""

    def guard(self, section: Section) -> PageGuard | None:
        """Verifies pages of what `unverified` gives; None: they are verified already."""
        return None

    @abstractmethod
    def range(self, section: Section, begin: int, end: int) -> np.ndarray:
        """Read-only [end - begin]: bytes `begin` to `end` of the section."""

    @abstractmethod
    def take(self, section: Section, ids: np.ndarray) -> np.ndarray:
        """A copy [len(ids), row_bytes] of rows; ids are int64 and exist."""

    def verify(self, section: Section) -> None:
        """Reads the whole section from the file, whatever was verified before."""
        step_bytes = -(-READ_BYTES // section.page_bytes) * section.page_bytes
        buffer = np.empty(min(step_bytes, section.num_bytes), np.uint8)
        for begin in range(0, section.num_bytes, step_bytes):
            part = buffer[: section.num_bytes - begin]
            self.file.read_into(part.data, section.offset_bytes + begin)
            self.check(section, part, begin // section.page_bytes)

    def check(self, section: Section, data: np.ndarray, first_page: int) -> None:
        """Raises IndexDamagedError unless `data` is what the file should hold from that page on."""
        num_pages = -(-len(data) // section.page_bytes)
        checksums = self.checksums(section)[first_page : first_page + num_pages]
        damage = find_damage(data, section.page_bytes, checksums)
        if damage is not None:
            expected = int(checksums[damage.page])
            page = first_page + damage.page
            raise _damaged(self.file.path, section, expected, page, damage.found)

    def checksums(self, section: Section) -> np.ndarray:
        """uint32 [pages], themselves verified."""
        checksums = self._checksums.get(section.name)
        if checksums is None:
            data = self._read_checksums(section)
            checksums = self._checksums[section.name] = np.frombuffer(data, np.uint32)
        return checksums

    def _read_checksums(self, section: Section) -> bytearray | np.ndarray:
        data = self.file.read(section.checksums_offset_bytes, 4 * section.num_pages)
        found = crc32c(data)
        if found != section.checksums_crc:
            raise _damaged_checksums(self.file.path, section, 0, found)
        return data


class MappedReader(SectionReader):
    """Pages are verified once, when they are asked for first."""

    def __init__(self, file: OpenFile) -> None:
        super().__init__(file)
        try:
            self._map = mmap.mmap(file.descriptor, file.num_bytes, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise IndexDamagedError(f"{file.path}: truncated while opened: {error}") from None
        self._guards: dict[str, PageGuard] = {}

    def whole(self, section: Section) -> np.ndarray:
        self.guard(section).verify_all()
        return self.unverified(section)

    def unverified(self, section: Section) -> np.ndarray:
        # the array keeps the map alive
        return np.frombuffer(self._map, np.uint8, section.num_bytes, section.offset_bytes)

    def verify_pages(self, section: Section, pages: np.ndarray) -> None:
        self.guard(section).verify(pages)

    def _read_checksums(self, section: Section) -> np.ndarray:
        num_bytes = 4 * section.num_pages
        data = np.frombuffer(self._map, np.uint8, num_bytes, section.checksums_offset_bytes)
        PageGuard(
            data,
            max(1, num_bytes),
            np.array([section.checksums_crc] if num_bytes else [], np.uint32),
            partial(_damaged_checksums, self.file.path, section),
            is_mapped=True,
            is_own=self.file.is_own,
            around_bytes=max(1, num_bytes),
        ).verify_all()
        return data

    def guard(self, section: Section) -> PageGuard:
        self.file.check_size()
        guard = self._guards.get(section.name)
        if guard is None:
            checksums = self.checksums(section)
            made = PageGuard(
                self.unverified(section),
                section.page_bytes,
                checksums,
                partial(_damaged_page, self.file.path, section, checksums),
                is_mapped=True,
                is_own=self.file.is_own,
                around_bytes=_AROUND_BYTES[section.page_class],
            )
            if section.page_class == "index" and section.num_bytes >= LARGE_SECTION_BYTES:
                self._want_huge_pages(section)
            # that of another thread, if it came first
            guard = self._guards.setdefault(section.name, made)
        return guard

    def _want_huge_pages(self, section: Section) -> None:
        """Searches read all over an index: with small pages they wait for page tables."""
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without them
                self._map.madvise(mmap.MADV_HUGEPAGE, section.offset_bytes, section.num_bytes)

    def range(self, section: Section, begin: int, end: int) -> np.ndarray:
        if begin < end:
            first, last = begin // section.page_bytes, (end - 1) // section.page_bytes
            self.verify_pages(section, np.arange(first, last + 1))
        return self.unverified(section)[begin:end]

    def take(self, section: Section, ids: np.ndarray) -> np.ndarray:
        self.verify_pages(section, pages_of_rows(section, ids))
        rows = self.unverified(section).reshape(section.shape[0], section.row_bytes)
        return rows[ids]

    def verify(self, section: Section) -> None:
        self.guard(section).verify_anew()


class MemoryReader(SectionReader):
    """A section is read and verified at its first touch, and kept until the file is closed."""

    def __init__(self, file: OpenFile) -> None:
        super().__init__(file)
        self._lock = Lock()
        self._read: dict[str, np.ndarray] = {}

    def whole(self, section: Section) -> np.ndarray:
        with self._lock:
            data = self._read.get(section.name)
            if data is None:
                data = aligned_empty((section.num_bytes,), np.uint8)
                self.file.read_into(data.data, section.offset_bytes)
                self.check(section, data, 0)
                data.setflags(write=False)
                self._read[section.name] = data
            return data

    def unverified(self, section: Section) -> np.ndarray:
        return self.whole(section)

    def verify_pages(self, section: Section, pages: np.ndarray) -> None:
        self.whole(section)

    def range(self, section: Section, begin: int, end: int) -> np.ndarray:
        return self.whole(section)[begin:end]

    def take(self, section: Section, ids: np.ndarray) -> np.ndarray:
        return self.whole(section).reshape(section.shape[0], section.row_bytes)[ids]


class PooledReader(SectionReader):
    """Blocks of pages are verified whenever they enter the pool. A whole section is one entry, in
    use as long as its array lives; rows are copied out of blocks."""

    def __init__(self, file: OpenFile, pool: BufferPool) -> None:
        super().__init__(file)
        self._pool = pool
        self._owner = object()
        weakref.finalize(self, pool.drop, self._owner)

    def whole(self, section: Section) -> np.ndarray:
        def load(buffer: memoryview) -> None:
            self.file.read_into(buffer, section.offset_bytes)
            self.check(section, np.frombuffer(buffer, np.uint8), 0)

        if section.num_bytes == 0:
            self.checksums(section)
            return _empty()
        key = (section.name, None)
        return self._pool.lease(self._owner, key, section.num_bytes, section.page_class, load)

    def unverified(self, section: Section) -> np.ndarray:
        return self.whole(section)

    def verify_pages(self, section: Section, pages: np.ndarray) -> None:
        """What is in the pool is verified."""

    def range(self, section: Section, begin: int, end: int) -> np.ndarray:
        data = np.empty(max(0, end - begin), np.uint8)
        block_bytes = section.block_bytes
        for block in range(begin // block_bytes, -(-end // block_bytes)):
            block_begin = block * block_bytes
            with self._block(section, block) as content:
                low, high = max(begin, block_begin), min(end, block_begin + len(content))
                data[low - begin : high - begin] = content[low - block_begin : high - block_begin]
        data.setflags(write=False)
        return data

    def take(self, section: Section, ids: np.ndarray) -> np.ndarray:
        row_bytes, block_bytes = section.row_bytes, section.block_bytes
        rows = np.empty((len(ids), row_bytes), np.uint8)
        order = np.argsort(ids, kind="stable")
        begins = ids[order] * row_bytes
        blocks = _areas_of_rows(ids, row_bytes, block_bytes)
        block_begins = blocks * block_bytes
        first = np.searchsorted(begins + row_bytes, block_begins, "right").tolist()
        end = np.searchsorted(begins, block_begins + block_bytes).tolist()
        places = list(zip(order.tolist(), begins.tolist(), strict=True))
        for i, block in enumerate(blocks.tolist()):
            block_begin = block * block_bytes
            with self._block(section, block) as content:
                for row, row_begin in places[first[i] : end[i]]:
                    begin = row_begin - block_begin
                    if begin >= 0 and begin + row_bytes <= block_bytes:
                        rows[row] = content[begin : begin + row_bytes]
                    else:  # goes on in a neighbouring block
                        part = content[max(begin, 0) : begin + row_bytes]
                        offset = max(-begin, 0)
                        rows[row, offset : offset + len(part)] = part
        return rows

    def _block(self, section: Section, block: int) -> AbstractContextManager[np.ndarray]:
        begin = block * section.block_bytes
        num_bytes = min(section.block_bytes, section.num_bytes - begin)

        def load(buffer: memoryview) -> None:
            self.file.read_into(buffer, section.offset_bytes + begin)
            data = np.frombuffer(buffer, np.uint8)
            self.check(section, data, begin // section.page_bytes)

        key = (section.name, block)
        return self._pool.pinned(self._owner, key, num_bytes, section.page_class, load)


def pages_of_rows(section: Section, ids: np.ndarray) -> np.ndarray:
    """int64: every page that holds a byte of these rows."""
    if section.has_row_pages:
        return ids
    return _areas_of_rows(ids, section.row_bytes, section.page_bytes)


def _areas_of_rows(ids: np.ndarray, row_bytes: int, area_bytes: int) -> np.ndarray:
    """int64, ascending."""
    if len(ids) == 0 or row_bytes == 0:
        return np.empty(0, np.int64)
    first = ids * row_bytes // area_bytes
    last = (ids * row_bytes + row_bytes - 1) // area_bytes
    longest = int((last - first).max())
    return np.unique(np.concatenate([np.minimum(first + i, last) for i in range(longest + 1)]))


def _damaged_page(
    path: Path, section: Section, checksums: np.ndarray, page: int, found: int | None
) -> IndexDamagedError:
    return _damaged(path, section, int(checksums[page]), page, found)


def _damaged_checksums(
    path: Path, section: Section, page: int, found: int | None
) -> IndexDamagedError:
    crc = "they cannot be read" if found is None else f"CRC-32C {found:#010x}"
    return IndexDamagedError(
        f"{path}: page checksums of section {section.name!r}: {crc}, expected "
        f"{section.checksums_crc:#010x}"
    )


def _damaged(
    path: Path, section: Section, expected: int, page: int, found: int | None
) -> IndexDamagedError:
    begin = section.offset_bytes + page * section.page_bytes
    place = (
        f"{path}: section {section.name!r}, page {page} of {section.num_pages} (from byte {begin} "
        "of the file)"
    )
    if found is None:
        return IndexDamagedError(
            f"{place}: cannot be read; the file was truncated while open, or the disk fails"
        )
    return IndexDamagedError(f"{place}: CRC-32C {found:#010x}, expected {expected:#010x}")


def _empty() -> np.ndarray:
    data = np.empty(0, np.uint8)
    data.setflags(write=False)
    return data
