# SPDX-License-Identifier: Apache-2.0
"""Named arrays in one file, with checksums: how indexes and contexts are stored
(docs/context-files.md)."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vllm_relay._C import PageGuard
from vllm_relay.sparse.files.aligned import aligned_empty
from vllm_relay.sparse.files.buffer_pool import BufferPool
from vllm_relay.sparse.files.damage import IndexDamagedError
from vllm_relay.sparse.files.section_readers import (
    OpenFile,
    SectionReader,
    mapped_sections,
    pooled_sections,
)
from vllm_relay.sparse.files.section_table import (
    FIXED_HEADER_BYTES,
    MAX_FILE_BYTES,
    Section,
    decode_fixed_header,
    decode_metadata,
)
from vllm_relay.sparse.files.section_writer import SectionWriter, write_sections

__all__ = ["SectionFile", "SectionReader", "SectionWriter", "write_sections"]


class SectionFile:
    """An open section file. For any number of threads.

    Attributes:
        header: what its writer gave.
        sections: by name, in the order they were written.
    """

    def __init__(
        self,
        file: OpenFile,
        header: dict[str, Any],
        sections: Mapping[str, Section],
        reader_of: Callable[[Section], SectionReader],
    ) -> None:
        self.path = file.path
        self.header = header
        self.sections = sections
        self.num_bytes = file.num_bytes
        self._open: tuple[OpenFile, Callable[[Section], SectionReader]] | None = file, reader_of
        self._readers: dict[str, SectionReader] = {}

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        mmap: bool = True,
        verify: Literal["lazy", "now"] = "lazy",
        pool: BufferPool | None = None,
    ) -> SectionFile:
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
        if pool is None and not mmap:
            pool = BufferPool(MAX_FILE_BYTES, empty=aligned_empty)
        reader_of = mapped_sections(opened) if pool is None else pooled_sections(opened, pool)
        file = cls(opened, header, sections, reader_of)
        if verify == "now":
            file.verify()
        return file

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.sections)

    def __contains__(self, name: object) -> bool:
        return name in self.sections

    def __getitem__(self, name: str) -> np.ndarray:
        """The section as a read-only array, verified, valid also after `close`.

        Raises:
            IndexDamagedError: names section and page.
            KeyError: no such section.
        """
        return self._reader(name).whole()

    def rows(self, name: str) -> SectionReader:
        """Access to rows of which only the pages that are touched are read and verified.

        Raises:
            KeyError: no such section.
            ValueError: it has no dimensions.
        """
        reader = self._reader(name)
        if not reader.shape:
            raise ValueError(f"section {name!r} has no dimensions, so it has no rows")
        return reader

    def arrays(
        self, names: Mapping[str, str], by_row: Collection[str] = ()
    ) -> tuple[dict[str, np.ndarray], dict[str, PageGuard]]:
        """Sections as arrays, under other names: `names[name of the array]` is the section.

        Those in `by_row` are not verified where that saves reading them as a whole, but have a
        guard, which verifies a row at its first touch. These guards come second. Raises
        IndexDamagedError, KeyError: as for an array."""
        arrays, guards = {}, {}
        for name, section_name in names.items():
            reader = self._reader(section_name)
            arrays[name], guard = reader.by_row() if name in by_row else (reader.whole(), None)
            if guard is not None:
                guards[name] = guard
        return arrays, guards

    def check_size(self) -> None:
        """Raises IndexDamagedError: the file was truncated while open."""
        self._opened()[0].check_size()

    def verify(self) -> None:
        """Reads every section from beginning to end, whatever was verified before. Raises
        IndexDamagedError: lists one page of each damaged section."""
        damages = []
        for name in self.sections:
            try:
                self._reader(name).verify()
            except IndexDamagedError as error:
                damages.append(str(error))
        if damages:
            raise IndexDamagedError("\n".join(damages))

    def close(self) -> None:
        """Arrays and rows that were handed out stay valid, and keep the file open."""
        self._open, self._readers = None, {}

    def __enter__(self) -> SectionFile:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _reader(self, name: str) -> SectionReader:
        _, reader_of = self._opened()
        reader = self._readers.get(name)
        if reader is None:
            if name not in self.sections:
                known = ", ".join(self.names)[:500]
                raise KeyError(f"{self.path}: no section {name!r}, it has {known}")
            # that of another thread, if it came first
            reader = self._readers.setdefault(name, reader_of(self.sections[name]))
        return reader

    def _opened(self) -> tuple[OpenFile, Callable[[Section], SectionReader]]:
        if self._open is None:
            raise ValueError(f"{self.path} is closed")
        return self._open


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
