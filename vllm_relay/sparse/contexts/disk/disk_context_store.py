# SPDX-License-Identifier: Apache-2.0
"""Contexts in a folder: one file each, found again by the next process."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter
from pathlib import Path

import numpy as np

from vllm_relay.sparse.contexts.context_fingerprint import ContextFingerprint, ForeignContextError
from vllm_relay.sparse.contexts.context_store import (
    ContextStore,
    HeadStates,
    Layers,
    Parent,
    ParentGoneError,
    StoredContext,
    context_id_of,
)
from vllm_relay.sparse.contexts.disk.context_file import (
    CONTEXT_SUFFIX,
    LINK_SUFFIX,
    ContextFile,
    ParentFile,
    index_type,
    write_context,
)
from vllm_relay.sparse.contexts.disk.context_folder import (
    delete_context,
    delete_unused_links,
    make_private_folder,
    parent_id_of,
    parent_path,
)
from vllm_relay.sparse.contexts.disk.disk_context import DiskContext, FileVersion, write_queries
from vllm_relay.sparse.files.buffer_pool import BufferPool, BufferPoolFullError
from vllm_relay.sparse.files.damage import IndexDamagedError

logger = logging.getLogger("vllm.relay")


class DiskContextStore(ContextStore):
    """The contexts of one model in a folder, which several processes may share.

    Opening the folder reads header, table and tokens of each file. Files that are damaged, or of
    another model, are reported and left alone; one whose damage is found later raises
    `IndexDamagedError` where it is read and is not used again.

    Args:
        path: the folder; made if missing, for its owner only.
        fingerprint: of the model.
        memory_limit_bytes: of the pages that are kept in memory; None maps the files.
        value_size: of the model; None takes any.

    Raises:
        OSError: the folder cannot be made or read.
    """

    def __init__(
        self,
        path: Path,
        fingerprint: ContextFingerprint,
        memory_limit_bytes: int | None = None,
        *,
        value_size: int | None = None,
    ) -> None:
        make_private_folder(path)
        self._path = path
        self._fingerprint = fingerprint
        self._value_size = value_size
        self._pool = None if memory_limit_bytes is None else BufferPool(memory_limit_bytes)
        self._open: dict[Path, DiskContext] = {}
        self._links: dict[Path, DiskContext] = {}  # deleted, and continued by others
        self._skipped: dict[Path, tuple[FileVersion, str]] = {}
        self._adding: Counter[Path] = Counter()  # nobody may delete one half of it
        self._continued: Counter[str] = Counter()  # by those
        self._lock = threading.RLock()
        self.contexts()
        self._delete_unused_links()

    @property
    def skipped(self) -> dict[str, str]:
        self.contexts()
        with self._lock:
            return {str(path): reason for path, (_, reason) in self._skipped.items()}

    def add(
        self, tokens: np.ndarray, layers: Layers, parent: Parent | None = None
    ) -> StoredContext:
        path = self._path / f"{context_id_of(tokens)}{CONTEXT_SUFFIX}"
        self._check_limit(path, max(map(_num_index_bytes, itertools.chain.from_iterable(layers))))
        continued = None
        with self._lock:
            link = path.with_suffix(LINK_SUFFIX)
            if link in self._links and self._links[link].damage is None:
                return self._undelete(link, path, layers)
            if parent is not None:
                if not self._has_all_of(parent):
                    raise ParentGoneError(parent.context.id)
                continued = ParentFile(parent.context.id, parent.num_tokens)
                self._continued[continued.context_id] += 1
            self._adding[path] += 1
        try:
            make_private_folder(self._path)  # somebody may have removed it
            # a context can do without its queries; queries without a context would stay for ever
            heads = itertools.chain.from_iterable(layers)
            write_context(path, self._fingerprint, tokens, heads, parent=continued)
            write_queries(path, layers)
            with self._lock:
                self._skipped.pop(path, None)
                self._open[path] = self._opened(path, FileVersion.of(path))
                return self._open[path]
        finally:
            with self._lock:
                self._adding[path] -= 1
                if continued is not None:
                    self._continued[continued.context_id] -= 1

    def parent_here(self, parent: Parent) -> Parent | None:
        with self._lock:
            self.contexts()
            for each in (*self._open.values(), *self._links.values()):
                if each.id == parent.context.id and each.damage is None:
                    here = each.first_tokens(parent.num_tokens)
                    return here if here is not None and self._has_all_of(here) else None
        return None

    def _has_all_of(self, parent: Parent) -> bool:
        """Whether the files are there under their names."""
        known = [*self._open.values(), *self._links.values()]
        links = parent.context.links(parent.num_tokens)
        return all(
            link.context in known and parent_path(self._path, link.context.id).exists()
            for link in links
        )

    def _undelete(self, link: Path, path: Path, layers: Layers) -> StoredContext:
        link.replace(path)
        write_queries(path, layers)
        context = self._open[path] = self._links.pop(link)
        context.path, context.version = path, FileVersion.of(path)
        return context

    def contexts(self) -> list[StoredContext]:
        """Files that came or went since the last time, or took the place of one that is left out,
        are noticed."""
        with self._lock:
            found = self._versions()
            for path, context in list(self._open.items()):
                damage = context.damage  # which another thread may find meanwhile
                if damage is not None:
                    self._skip(path, context.version, damage)
                if damage is not None or path not in found:
                    del self._open[path]
            for path, (version, _) in list(self._skipped.items()):
                if found.get(path) != version:
                    del self._skipped[path]
            for path, version in sorted(found.items(), key=lambda each: each[1]):
                if path in self._open or path in self._skipped or self._adding[path]:
                    continue
                try:
                    self._open[path] = self._opened(path, version)
                except (FileNotFoundError, BufferPoolFullError):
                    continue  # looked at again: sessions of other threads use the room for now
                except (ForeignContextError, IndexDamagedError, OSError) as error:
                    self._skip(path, version, str(error))
            return list(self._open.values())

    def delete(self, context_id: str) -> None:
        with self._lock:
            paths = [path for path, context in self._open.items() if context.id == context_id]
            for path in paths:  # more than one if somebody has copied it
                link = delete_context(path, +self._continued, self._parent_id)
                context = self._open.pop(path)
                if link is not None:
                    self._links[link] = context
                    context.path = link
            self._delete_unused_links()
        if not paths:
            raise KeyError(context_id)

    def close(self) -> None:
        with self._lock:
            self._open.clear()
            self._links.clear()

    def _delete_unused_links(self) -> None:
        with self._lock:
            try:
                for link in delete_unused_links(self._path, +self._continued, self._parent_id):
                    self._links.pop(link, None)
            except OSError as error:
                logger.warning("a link of deleted contexts stays: %s", error)

    def _parent_id(self, path: Path) -> str | None:
        """Of any file in the folder, without reading it if that is known."""
        known = self._open.get(path) or self._links.get(path)
        return parent_id_of(path) if known is None else known.parent_id

    def _versions(self) -> dict[Path, FileVersion]:
        versions = {}
        for path in self._path.glob(f"*{CONTEXT_SUFFIX}"):
            try:
                versions[path] = FileVersion.of(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                versions[path] = unknown = FileVersion(0, path.name, 0, 0)
                if path not in self._open and path not in self._skipped:
                    self._skip(path, unknown, str(error))
        return versions

    def _opened(
        self, path: Path, version: FileVersion, child: ContextFile | None = None
    ) -> DiskContext:
        """Args: child: what continues it, if it is opened for that."""
        file = ContextFile.open(path, expected=self._fingerprint, pool=self._pool)
        num_heads = self._fingerprint.num_layers * self._fingerprint.num_kv_heads
        if sum(file.index_kinds.values()) < num_heads:
            raise ForeignContextError(f"{path}: has kv heads without an index")
        for kind in file.index_kinds:
            try:
                index_type(kind)
            except ValueError as error:
                raise ForeignContextError(f"{path}: {error}") from None
        value_size = file.rows(0, 0, "values").shape[1]
        if self._value_size not in (None, value_size):
            raise ForeignContextError(
                f"{path}: values of {value_size} elements, expected {self._value_size}"
            )
        if self._pool is not None:
            self._check_limit(path, _num_leased_bytes(file))
        if child is not None and not file.own_begin < child.own_begin <= file.num_tokens:
            raise IndexDamagedError(
                f"{path}: its own tokens are {file.own_begin} to {file.num_tokens}, and "
                f"{child.path} continues {child.own_begin}"
            )
        parent = self._parent(file)
        return DiskContext(file, version, parent, is_pooled=self._pool is not None)

    def _parent(self, file: ContextFile) -> Parent | None:
        """What a file continues; opened, if it is not yet."""
        if file.parent is None:
            return None
        context_id, num_tokens = file.parent
        path = parent_path(self._path, context_id)
        context = self._open.get(path) or self._links.get(path)
        if context is None:
            try:
                version = FileVersion.of(path)
                if self._skipped.get(path, (None, ""))[0] == version:
                    raise IndexDamagedError(self._skipped[path][1])
                context = self._opened(path, version, file)
            except RecursionError:
                raise IndexDamagedError(f"{file.path}: continues too many others") from None
            except (ForeignContextError, IndexDamagedError, OSError) as error:
                raise IndexDamagedError(f"{file.path} continues {path}: {error}") from error
            known = self._links if path.suffix == LINK_SUFFIX else self._open
            known[path] = context
        if context.damage is not None:
            raise IndexDamagedError(f"{file.path} continues {path}: {context.damage}")
        parent = context.first_tokens(num_tokens)
        first = file.file.rows("tokens").range(0, num_tokens)
        if parent is None or not np.array_equal(context.tokens[:num_tokens], first):
            raise IndexDamagedError(f"{file.path} continues {path}: it has other tokens")
        return parent

    def _check_limit(self, path: Path, num_bytes: int) -> None:
        """Raises ForeignContextError: the pool will never have room for that much at once."""
        if self._pool is not None and num_bytes > self._pool.limit_bytes:
            raise ForeignContextError(
                f"{path}: memory_limit_bytes is {self._pool.limit_bytes}, expected at least "
                f"{num_bytes}, which is read at once for one kv head"
            )

    def _skip(self, path: Path, version: FileVersion, reason: str) -> None:
        self._skipped[path] = version, reason
        logger.warning("context left out: %s", reason)


def _num_index_bytes(head: HeadStates) -> int:
    _, arrays = head.index.to_arrays()
    return sum(array.nbytes for array in arrays.values())


def _num_leased_bytes(file: ContextFile) -> int:
    """What has to be in memory at once: a block of anything, or an index with its keys."""
    sections = file.file.sections
    block = max(min(section.num_bytes, section.block_bytes) for section in sections.values())
    indexes = [set(entry["arrays"].values()) for entry in file.file.header["indexes"].values()]
    return max(block, *(sum(sections[name].num_bytes for name in names) for names in indexes))
