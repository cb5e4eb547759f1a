# SPDX-License-Identifier: Apache-2.0
"""Named arrays in one file, with checksums: how indexes and contexts are stored
(docs/context-files.md)."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from vllm_relay._C import PageGuard
from vllm_relay.sparse.files.buffer_pool import BufferPool
from vllm_relay.sparse.files.damage import IndexDamagedError
from vllm_relay.sparse.files.section_readers import (
    MappedReader,
    MemoryReader,
    OpenFile,
    PooledReader,
    SectionReader,
    pages_of_rows,
)
from vllm_relay.sparse.files.section_table import (
    FIXED_HEADER_BYTES,
    Section,
    decode_fixed_header,
    decode_metadata,
)
from vllm_relay.sparse.files.section_writer import SectionWriter, write_sections

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["SectionFile", "SectionRows", "SectionWriter", "write_sections"]


class SectionFile:
    """An open section file. For any number of threads.

    Attributes:
        path: of the file.
        header: what its writer gave.
        sections: by name, in the order they were written.
        num_bytes: of the file.
    """

    def __init__(
        self,
        path: Path,
        header: dict[str, Any],
        sections: Mapping[str, Section],
        reader: SectionReader,
    ) -> None:
        self.path = path
        self.header = header
        self.sections = sections
        self.num_bytes = reader.file.num_bytes
        self._reader: SectionReader | None = reader

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        mmap: bool = True,
        verify: Literal["lazy", "now"] = "lazy",
        pool: BufferPool | None = None,
    ) -> Self:
        """
        Args:
            mmap: map the file; otherwise sections are read into memory when they are touched.
            verify: "now" reads every byte before it returns.
            pool: read through it instead, and let go of pages when its room is needed.

        Raises:
            IndexDamagedError: not such a file, of another version, truncated or damaged; with
                verify="lazy" only header and table have been looked at.
            OSError: the file cannot be opened.
        """
        if verify not in ("lazy", "now"):
            raise ValueError(f"verify is {verify!r}, expected 'lazy' or 'now'")
        path = Path(path)
        opened = _open(path)
        first = opened.read(0, min(FIXED_HEADER_BYTES, opened.num_bytes))
        with _naming(path):
            fixed = decode_fixed_header(bytes(first), opened.num_bytes)
        metadata = opened.read(fixed.metadata_offset_bytes, fixed.metadata_bytes)
        with _naming(path):
            header, sections = decode_metadata(bytes(metadata), fixed)
        reader: SectionReader
        if pool is not None:
            reader = PooledReader(opened, pool)
        else:
            reader = (MappedReader if mmap else MemoryReader)(opened)
        file = cls(path, header, sections, reader)
        if verify == "now":
            file.verify()
        return file

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.sections)

    def __contains__(self, name: object) -> bool:
        return name in self.sections

    def __getitem__(self, name: str) -> np.ndarray:
        """The section as a read-only array, valid also after `close`.

        Its checksums are verified before the first array of it is handed out.

        Raises:
            IndexDamagedError: names section and page.
            KeyError: no such section.
        """
        section = self._section(name)
        return _as_array(section, self._open_reader().whole(section))

    def rows(self, name: str) -> SectionRows:
        """Access to rows of which only the pages that are touched are read and verified."""
        return SectionRows(self._section(name), self._open_reader())

    def arrays(
        self, names: Mapping[str, str], by_row: Collection[str] = ()
    ) -> tuple[dict[str, np.ndarray], dict[str, PageGuard]]:
        """Sections as arrays, under other names: `names[name of the array]` is the section.

        Those in `by_row` are not verified where that saves reading them as a whole, but have a
        guard, which verifies a row at its first touch. These guards come second.

        Raises:
            IndexDamagedError, KeyError: as for an array.
        """
        arrays, guards = {}, {}
        for name, section_name in names.items():
            section, reader = self._section(section_name), self._open_reader()
            guard = reader.guard(section) if name in by_row and section.has_row_pages else None
            if guard is None:
                arrays[name] = self[section_name]
            else:
                guards[name] = guard
                arrays[name] = _as_array(section, reader.unverified(section))
        return arrays, guards

    def check_size(self) -> None:
        """Raises IndexDamagedError: the file was truncated while open."""
        self._open_reader().file.check_size()

    def verify(self) -> None:
        """Reads every section from beginning to end, whatever was verified before.

        Raises:
            IndexDamagedError: lists one page of each damaged section.
        """
        reader = self._open_reader()
        damages = []
        for section in self.sections.values():
            try:
                reader.verify(section)
            except IndexDamagedError as error:
                damages.append(str(error))
        if damages:
            raise IndexDamagedError("\n".join(damages))

    def close(self) -> None:
        """Arrays and rows that were handed out stay valid, and keep the file open."""
        self._reader = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _section(self, name: str) -> Section:
        if name not in self.sections:
            known = ", ".join(self.names)[:500]
            raise KeyError(f"{self.path}: no section {name!r}, it has {known}")
        return self.sections[name]

    def _open_reader(self) -> SectionReader:
        if self._reader is None:
            raise ValueError(f"{self.path} is closed")
        return self._reader


class SectionRows:
    """The first dimension of a section, read where it is touched. Valid also after `close`.

    Raises:
        ValueError: the section has no dimensions.
    """

    def __init__(self, section: Section, reader: SectionReader) -> None:
        if not section.shape:
            raise ValueError(f"section {section.name!r} has no dimensions, so it has no rows")
        self._section = section
        self._reader = reader

    @property
    def shape(self) -> tuple[int, ...]:
        return self._section.shape

    @property
    def dtype(self) -> np.dtype:
        return self._section.dtype

    def __len__(self) -> int:
        return self._section.shape[0]

    def range(self, begin: int, end: int) -> np.ndarray:
        """Read-only [end - begin, ...]: rows `begin` to `end`; a view where the file is mapped.

        Raises:
            IndexDamagedError: a page of them is damaged; names it.
            IndexError: no such rows.
        """
        if not 0 <= begin <= end <= len(self):
            raise IndexError(
                f"section {self._section.name!r}: rows {begin} to {end} of {len(self)}"
            )
        row_bytes = self._section.row_bytes
        data = self._reader.range(self._section, begin * row_bytes, end * row_bytes)
        return data.view(self.dtype).reshape(end - begin, *self.shape[1:])

    def take(self, ids: Any) -> np.ndarray:
        """A copy [m, ...] of rows; `ids` are whole numbers [m] in any order. Raises as `range`."""
        rows = self._reader.take(self._section, self._check_ids(ids))
        return rows.view(self.dtype).reshape(len(rows), *self.shape[1:])

    def verify_ids(self, ids: Any) -> None:
        """Verifies what has not been verified yet of the pages that hold these rows.

        Raises:
            IndexDamagedError, IndexError: as `range`.
        """
        pages = pages_of_rows(self._section, self._check_ids(ids))
        self._reader.verify_pages(self._section, pages)

    def unverified(self) -> np.ndarray:
        """Read-only, all rows; a mapped section as it lies in the file, of which only rows that
        `verify_ids` has passed may be read."""
        return _as_array(self._section, self._reader.unverified(self._section))

    def _check_ids(self, ids: Any) -> np.ndarray:
        ids = np.asarray(ids)
        if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
            raise ValueError(f"ids: {ids.dtype} {list(ids.shape)}, expected whole numbers [m]")
        if len(ids) and not (ids.min() >= 0 and ids.max() < len(self)):
            raise IndexError(
                f"section {self._section.name!r}: rows {ids.min()} to {ids.max()} of {len(self)}"
            )
        return ids.astype(np.int64)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors of what has seen bytes only say of which file they are."""
    try:
        yield
    except IndexDamagedError as error:
        raise IndexDamagedError(f"{path}: {error}") from None


def _open(path: Path) -> OpenFile:
    # without O_NONBLOCK, opening a named pipe would wait for its writer
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    status = os.fstat(descriptor)
    file = OpenFile(path, descriptor, status.st_size)
    if not stat.S_ISREG(status.st_mode):
        raise IndexDamagedError(f"{path}: not a regular file")
    return file


def _as_array(section: Section, data: np.ndarray) -> np.ndarray:
    return data.view(section.dtype).reshape(section.shape)
