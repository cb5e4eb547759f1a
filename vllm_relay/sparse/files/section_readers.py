# SPDX-License-Identifier: Apache-2.0
"""The sections of an open file: mapped, or read through a buffer pool."""

from __future__ import annotations

import mmap
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vllm_relay._C import PageGuard, find_damage
from vllm_relay.sparse.files.buffer_pool import BufferPool
from vllm_relay.sparse.files.checksum import crc32c
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
        """Raises IndexDamagedError: the disk cannot read it, or the file ends before."""
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
    """One section: an array whose rows are read where they are touched.

    Hands out verified bytes only, except `unverified`. Valid also after its file was closed, and
    for any number of threads.
    """

    def __init__(self, file: OpenFile, section: Section) -> None:
        self.file = file
        self.section = section
        self._checksums: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.section.shape

    @property
    def dtype(self) -> np.dtype:
        return self.section.dtype

    def __len__(self) -> int:
        return self.section.shape[0]

    @property
    def guard(self) -> PageGuard | None:
        """Verifies pages of what `unverified` gives; None: they are verified already."""
        return None

    def whole(self) -> np.ndarray:
        """The section, read-only. Raises IndexDamagedError: a page is damaged; names it."""
        return self._shaped(self._whole())

    def unverified(self) -> np.ndarray:
        """The section, read-only; a mapped one as it lies in the file, of which only rows that
        `verify_ids` has passed may be read."""
        return self.whole()

    def by_row(self) -> tuple[np.ndarray, PageGuard | None]:
        """The section, read-only, and a guard that has to pass a row before it is read; without one
        it is verified. Raises IndexDamagedError as `whole`."""
        guard = self.guard if self.section.has_row_pages else None
        return (self.whole() if guard is None else self.unverified()), guard

    def range(self, begin: int, end: int) -> np.ndarray:
        """Read-only [end - begin, ...]: rows `begin` to `end`; a view where the file is mapped.

        Raises:
            IndexDamagedError: a page of them is damaged; names it.
            IndexError: no such rows.
        """
        if not 0 <= begin <= end <= len(self):
            raise IndexError(f"section {self.section.name!r}: rows {begin} to {end} of {len(self)}")
        row_bytes = self.section.row_bytes
        data = self._range(begin * row_bytes, end * row_bytes)
        return data.view(self.dtype).reshape(end - begin, *self.shape[1:])

    def take(self, ids: Any) -> np.ndarray:
        """A copy [m, ...] of rows; `ids` are whole numbers [m] in any order. Raises as `range`."""
        rows = self._take(self._check_ids(ids))
        return rows.view(self.dtype).reshape(len(rows), *self.shape[1:])

    def verify_ids(self, ids: Any) -> None:
        """Verifies what has not been verified yet of the pages that hold these rows. Raises as
        `range`."""
        self._check_ids(ids)

    def verify(self) -> None:
        """Reads the whole section from the file, whatever was verified before."""
        section = self.section
        step_bytes = -(-READ_BYTES // section.page_bytes) * section.page_bytes
        buffer = np.empty(min(step_bytes, section.num_bytes), np.uint8)
        for begin in range(0, section.num_bytes, step_bytes):
            self._read_verified(buffer[: section.num_bytes - begin].data, begin)

    @abstractmethod
    def _whole(self) -> np.ndarray:
        """Read-only uint8 [num_bytes]."""

    @abstractmethod
    def _range(self, begin: int, end: int) -> np.ndarray:
        """Read-only uint8 [end - begin]: bytes of the section."""

    @abstractmethod
    def _take(self, ids: np.ndarray) -> np.ndarray:
        """A copy uint8 [len(ids), row_bytes]; ids are int64 and exist."""

    def _read_verified(self, buffer: memoryview, begin: int) -> None:
        """Fills the buffer with the section's bytes from `begin` on, where a page begins."""
        section = self.section
        self.file.read_into(buffer, section.offset_bytes + begin)
        first_page, num_pages = begin // section.page_bytes, -(-len(buffer) // section.page_bytes)
        checksums = self._page_checksums()
        expected = checksums[first_page : first_page + num_pages]
        page, found = find_damage(np.frombuffer(buffer, np.uint8), section.page_bytes, expected)
        if page >= 0:
            raise _damaged_page(self.file.path, section, checksums, first_page + page, found)

    def _page_checksums(self) -> np.ndarray:
        """uint32 [pages], themselves verified."""
        if self._checksums is None:
            section = self.section
            data = self.file.read(section.checksums_offset_bytes, 4 * section.num_pages)
            found = crc32c(data)
            if found != section.checksums_crc:
                raise IndexDamagedError(
                    f"{self.file.path}: page checksums of section {section.name!r}: CRC-32C "
                    f"{found:#010x}, expected {section.checksums_crc:#010x}"
                )
            self._checksums = self._kept_checksums(data)
        return self._checksums

    def _kept_checksums(self, data: bytearray) -> np.ndarray:
        return np.frombuffer(data, np.uint32)

    def _shaped(self, data: np.ndarray) -> np.ndarray:
        return data.view(self.dtype).reshape(self.shape)

    def _check_ids(self, ids: Any) -> np.ndarray:
        ids = np.asarray(ids)
        if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
            raise ValueError(f"ids: {ids.dtype} {list(ids.shape)}, expected whole numbers [m]")
        if len(ids) and not (ids.min() >= 0 and ids.max() < len(self)):
            raise IndexError(
                f"section {self.section.name!r}: rows {ids.min()} to {ids.max()} of {len(self)}"
            )
        return ids.astype(np.int64)


class MappedSection(SectionReader):
    """Pages are verified once, when they are asked for first."""

    def __init__(self, map_: mmap.mmap, file: OpenFile, section: Section) -> None:
        super().__init__(file, section)
        self._map = map_
        # the array keeps the map alive
        self._data = np.frombuffer(map_, np.uint8, section.num_bytes, section.offset_bytes)
        self._guard: PageGuard | None = None

    @property
    def guard(self) -> PageGuard:
        self.file.check_size()
        if self._guard is None:
            section, checksums = self.section, self._page_checksums()
            guard = PageGuard(
                self._data,
                section.page_bytes,
                checksums,
                partial(_damaged_page, self.file.path, section, checksums),
                is_mapped=True,
                is_own=self.file.is_own,
                around_bytes=_AROUND_BYTES[section.page_class],
            )
            is_large = section.page_class == "index" and section.num_bytes >= LARGE_SECTION_BYTES
            if is_large and hasattr(mmap, "MADV_HUGEPAGE"):
                # searches read all over an index: with small pages they wait for page tables
                with suppress(OSError):  # a kernel without them
                    self._map.madvise(mmap.MADV_HUGEPAGE, section.offset_bytes, section.num_bytes)
            self._guard = self._guard or guard  # that of another thread, if it came first
        return self._guard

    def unverified(self) -> np.ndarray:
        return self._shaped(self._data)

    def verify_ids(self, ids: Any) -> None:
        self._verify_rows(self._check_ids(ids))

    def verify(self) -> None:
        self.guard.verify_anew()

    def _whole(self) -> np.ndarray:
        self.guard.verify_all()
        return self._data

    def _range(self, begin: int, end: int) -> np.ndarray:
        if begin < end:
            page_bytes = self.section.page_bytes
            self.guard.verify(np.arange(begin // page_bytes, (end - 1) // page_bytes + 1))
        return self._data[begin:end]

    def _take(self, ids: np.ndarray) -> np.ndarray:
        self._verify_rows(ids)
        return self._data.reshape(len(self), self.section.row_bytes)[ids]

    def _verify_rows(self, ids: np.ndarray) -> None:
        section = self.section
        pages = ids
        if not section.has_row_pages:
            pages = _areas_of_rows(ids, section.row_bytes, section.page_bytes)
        self.guard.verify(pages)

    def _kept_checksums(self, data: bytearray) -> np.ndarray:
        """Where they lie: as those of large files, they need not stay in memory."""
        section = self.section
        return np.frombuffer(
            self._map, np.uint32, section.num_pages, section.checksums_offset_bytes
        )


class PooledSection(SectionReader):
    """Blocks of pages are verified whenever they enter the pool. The whole section is one entry, in
    use as long as its array lives; rows are copied out of blocks."""

    def __init__(self, pool: BufferPool, owner: object, file: OpenFile, section: Section) -> None:
        super().__init__(file, section)
        self._pool = pool
        self._owner = owner

    def _whole(self) -> np.ndarray:
        section = self.section
        if section.num_bytes == 0:
            self._page_checksums()
            return np.frombuffer(b"", np.uint8)
        load = partial(self._read_verified, begin=0)
        key = (section.name, None)
        return self._pool.lease(self._owner, key, section.num_bytes, section.page_class, load)

    def _range(self, begin: int, end: int) -> np.ndarray:
        data = np.empty(end - begin, np.uint8)
        block_bytes = self.section.block_bytes
        for block in range(begin // block_bytes, -(-end // block_bytes)):
            block_begin = block * block_bytes
            with self._block(block) as content:
                low, high = max(begin, block_begin), min(end, block_begin + len(content))
                data[low - begin : high - begin] = content[low - block_begin : high - block_begin]
        data.setflags(write=False)
        return data

    def _take(self, ids: np.ndarray) -> np.ndarray:
        row_bytes, block_bytes = self.section.row_bytes, self.section.block_bytes
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
            with self._block(block) as content:
                for row, row_begin in places[first[i] : end[i]]:
                    begin = row_begin - block_begin
                    if begin >= 0 and begin + row_bytes <= block_bytes:
                        rows[row] = content[begin : begin + row_bytes]
                    else:  # goes on in a neighbouring block
                        part = content[max(begin, 0) : begin + row_bytes]
                        offset = max(-begin, 0)
                        rows[row, offset : offset + len(part)] = part
        return rows

    def _block(self, block: int) -> AbstractContextManager[np.ndarray]:
        section = self.section
        begin = block * section.block_bytes
        num_bytes = min(section.block_bytes, section.num_bytes - begin)
        load = partial(self._read_verified, begin=begin)
        key = (section.name, block)
        return self._pool.pinned(self._owner, key, num_bytes, section.page_class, load)


def mapped_sections(file: OpenFile) -> Callable[[Section], SectionReader]:
    """Makes the readers of a file's sections. Raises IndexDamagedError: it was truncated."""
    try:
        map_ = mmap.mmap(file.descriptor, file.num_bytes, access=mmap.ACCESS_READ)
    except ValueError as error:
        raise IndexDamagedError(f"{file.path}: truncated while opened: {error}") from None
    return partial(MappedSection, map_, file)


def pooled_sections(file: OpenFile, pool: BufferPool) -> Callable[[Section], SectionReader]:
    """Makes the readers of a file's sections; the pool lets go of them with the file."""
    owner = object()
    weakref.finalize(file, pool.drop, owner)
    return partial(PooledSection, pool, owner, file)


def _areas_of_rows(ids: np.ndarray, row_bytes: int, area_bytes: int) -> np.ndarray:
    """int64, ascending: those that hold a byte of these rows."""
    if len(ids) == 0 or row_bytes == 0:
        return np.empty(0, np.int64)
    first = ids * row_bytes // area_bytes
    last = (ids * row_bytes + row_bytes - 1) // area_bytes
    longest = int((last - first).max())
    return np.unique(np.concatenate([np.minimum(first + i, last) for i in range(longest + 1)]))


def _damaged_page(
    path: Path, section: Section, checksums: np.ndarray, page: int, found: int | None
) -> IndexDamagedError:
    """Args: found: the page's checksum as it is; None: it cannot be read."""
    begin = section.offset_bytes + page * section.page_bytes
    reason = "cannot be read; the file was truncated while open, or the disk fails"
    if found is not None:
        reason = f"CRC-32C {found:#010x}, expected {int(checksums[page]):#010x}"
    return IndexDamagedError(
        f"{path}: section {section.name!r}, page {page} of {section.num_pages} (from byte {begin} "
        f"of the file): {reason}"
    )
