# SPDX-License-Identifier: Apache-2.0
"""Contexts in a folder: one file each, found again by the next process."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vllm_relay.sparse.contexts.context_file import (
    CONTEXT_SUFFIX,
    LINK_SUFFIX,
    QUERIES_SUFFIX,
    ContextFile,
    ContextHead,
    ParentFile,
    index_type,
    write_context,
)
from vllm_relay.sparse.contexts.context_fingerprint import ContextFingerprint, ForeignContextError
from vllm_relay.sparse.contexts.context_folder import (
    delete_context,
    delete_unused_links,
    make_private_folder,
    parent_id_of,
    parent_path,
)
from vllm_relay.sparse.contexts.context_store import (
    ContextShape,
    ContextStore,
    HeadStates,
    Parent,
    ParentGoneError,
    StoredContext,
    context_id_of,
    sparse_layer,
)
from vllm_relay.sparse.contexts.tokens import TOKEN_DTYPE
from vllm_relay.sparse.files.buffer_pool import BufferPool, BufferPoolFullError
from vllm_relay.sparse.files.damage import IndexDamagedError
from vllm_relay.sparse.files.section_file import SectionFile, write_sections
from vllm_relay.sparse.index.compiled_index import CompiledIndex
from vllm_relay.sparse.index.elements import STORAGE, Elements, check_finite
from vllm_relay.sparse.index.key_index import KeyIndex
from vllm_relay.sparse.index.sparse_layer import SparseLayer
from vllm_relay.sparse.plan.head_plan import HeadPlan

logger = logging.getLogger("vllm.relay")


class FileVersion(NamedTuple):
    """Differs where a file was replaced or written again; sorts by age."""

    mtime_ns: int
    name: str
    inode: int
    num_bytes: int

    @classmethod
    def of(cls, path: Path) -> FileVersion:
        """Raises OSError."""
        status = path.stat()
        return cls(status.st_mtime_ns, path.name, status.st_ino, status.st_size)


class DiskContext(StoredContext):
    """A context in a file, of which pages are read and verified when they are needed.

    Attributes:
        path: of the file.
        version: of the file, when it was opened.
    """

    def __init__(
        self, file: ContextFile, version: FileVersion, parent: Parent | None, *, is_pooled: bool
    ) -> None:
        self.path = file.path
        self.version = version
        self.parent = parent
        self._damage: str | None = None
        # by pages: a pool need not have room for all of them
        self.tokens = file.file.rows("tokens").range(0, file.num_tokens).astype(TOKEN_DTYPE)
        self.id = context_id_of(self.tokens)
        self.shape = ContextShape(
            num_layers=file.fingerprint.num_layers,
            num_kv_heads=file.fingerprint.num_kv_heads,
            head_size=file.fingerprint.head_size,
            value_size=file.value_rows(0, 0).shape[1],
            dtype=file.fingerprint.dtype,
        )
        self._file = file
        self._is_pooled = is_pooled
        self._indexes: dict[tuple[int, int], KeyIndex] = {}
        self._layers: dict[int, SparseLayer | None] = {}
        self._plans: dict[tuple[int, int], HeadPlan | None] = {}

    @property
    def num_bytes(self) -> int:
        return self._file.file.num_bytes

    @property
    def disk_bytes(self) -> int:
        """Of the file, and of that with the training queries."""
        with suppress(OSError):
            return self.num_bytes + self.path.with_suffix(QUERIES_SUFFIX).stat().st_size
        return self.num_bytes

    @property
    def damage(self) -> str | None:
        return super().damage if self._damage is None else self._damage

    def own_rows(self, layer: int, head: int, begin: int, end: int) -> tuple[Elements, Elements]:
        with self._reading_file():
            return (
                self._elements(self._file.key_rows(layer, head).range(begin, end)),
                self._elements(self._file.value_rows(layer, head).range(begin, end)),
            )

    def gather(
        self, layer: int, head: int, ids: list[np.ndarray]
    ) -> tuple[Elements, Elements, list[np.ndarray]]:
        seen = np.unique(np.concatenate(ids))
        keys, values = self._file.key_rows(layer, head), self._file.value_rows(layer, head)
        with self._reading_file():
            if self._is_pooled:
                places = [np.searchsorted(seen, found).astype(np.int32) for found in ids]
                return self._elements(keys.take(seen)), self._elements(values.take(seen)), places
            for rows in (keys, values):
                rows.verify_ids(seen)
            return self._elements(keys.unverified()), self._elements(values.unverified()), ids

    def index(self, layer: int, head: int) -> KeyIndex:
        index = self._indexes.get((layer, head))
        if index is None:
            with self._reading_file():
                index = self._index(layer, head)
            if not self._is_pooled:
                self._indexes[layer, head] = index
        return index

    def _index(self, layer: int, head: int) -> KeyIndex:
        index = self._file.index(layer, head)
        if isinstance(index, CompiledIndex) and not (
            self._file.indexes_own_keys(layer, head) and index.keys_dtype == self.shape.dtype
        ):
            raise IndexDamagedError(f"{self.path}: an index of other keys than those of its head")
        return index

    def layer(self, layer: int) -> SparseLayer | None:
        if self._is_pooled:
            return None
        if layer not in self._layers:
            indexes = [self.index(layer, head) for head in range(self.shape.num_kv_heads)]
            with self._noticing_damage([self]):
                values = [self._file.guarded_values(layer, head) for head in range(len(indexes))]
                means = [self._file.value_means(layer, head) for head in range(len(indexes))]
            self._layers[layer] = sparse_layer(
                indexes, [each for each, _ in values], means, [guard for _, guard in values]
            )
        return self._layers[layer]

    @contextmanager
    def reading(self) -> Iterator[None]:
        links = (link.context for link in self.links(self.num_tokens))
        with self._noticing_damage([each for each in links if isinstance(each, DiskContext)]):
            yield

    @contextmanager
    def _noticing_damage(self, contexts: Sequence[DiskContext]) -> Iterator[None]:
        try:
            for each in contexts:
                if not each._is_pooled:
                    each._file.file.check_size()
            yield
        except IndexDamagedError as error:
            message = str(error)
            # a page is named by what its file was called when it was opened
            damaged = [
                each
                for each in contexts
                if str(each.path) in message or str(each._file.path) in message
            ]
            if damaged:
                for each in damaged:
                    each._damage = message
                raise
            # of what was searched, which knows no file: of several, all are suspected
            message = f"{' or '.join(str(each.path) for each in contexts)}: {message}"
            for each in contexts:
                each._damage = message
            raise IndexDamagedError(message) from error

    @contextmanager
    def _reading_file(self) -> Iterator[None]:
        """As `reading` its own file, and a pool that is full is told of as the option that limits
        it."""
        try:
            with self._noticing_damage([self]):
                yield
        except BufferPoolFullError as error:
            raise BufferPoolFullError(
                f"memory_limit_bytes is too small for what is read at the same time: {error}"
            ) from None

    def plan(self, layer: int, head: int) -> HeadPlan | None:
        if (layer, head) not in self._plans:
            self._plans[layer, head] = self._read_plan(layer, head)
        return self._plans[layer, head]

    def _read_plan(self, layer: int, head: int) -> HeadPlan | None:
        content = self._file.plan(layer, head)
        if content is None:
            return None
        try:
            return HeadPlan.from_json(content)
        except ValueError as error:
            # the header is intact: another version wrote it. Without a plan it is read correctly
            logger.warning("%s: plan left out: %s", self.path, error)
            return None

    def train_queries(self, layer: int, head: int) -> Elements | None:
        try:
            with SectionFile.open(self.path.with_suffix(QUERIES_SUFFIX), mmap=False) as file:
                name = _queries_name(layer, head)
                return self._fitting(file[name]) if name in file else None
        except (OSError, ValueError) as error:
            logger.warning("training queries left out: %s", error)
            return None

    def _fitting(self, queries: np.ndarray) -> Elements:
        """Raises ValueError: they are not of the dtype and size of the keys, or not finite."""
        size, dtype = self.shape.head_size, self.shape.dtype
        if queries.dtype != STORAGE[dtype] or queries.ndim != 2 or queries.shape[1] != size:
            raise ValueError(
                f"{self.path.with_suffix(QUERIES_SUFFIX)}: {queries.dtype} {list(queries.shape)}, "
                f"expected {dtype} [m, {size}]"
            )
        elements = self._elements(queries)
        check_finite(str(self.path.with_suffix(QUERIES_SUFFIX)), elements)
        return elements

    def _elements(self, data: np.ndarray) -> Elements:
        return Elements(data, self.shape.dtype)


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
        self,
        tokens: np.ndarray,
        layers: Sequence[Sequence[HeadStates]],
        parent: Parent | None = None,
    ) -> StoredContext:
        path = self._path / f"{context_id_of(tokens)}{CONTEXT_SUFFIX}"
        heads = (head for heads in layers for head in heads)
        self._check_limit(path, max(_num_index_bytes(head) for head in heads))
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
            write_context(path, self._fingerprint, tokens, _heads(layers), parent=continued)
            _write_queries(path, layers)
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

    def _undelete(
        self, link: Path, path: Path, layers: Sequence[Sequence[HeadStates]]
    ) -> StoredContext:
        link.replace(path)
        _write_queries(path, layers)
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
        value_size = file.value_rows(0, 0).shape[1]
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


def _heads(layers: Sequence[Sequence[HeadStates]]) -> Iterator[ContextHead]:
    for layer, heads in enumerate(layers):
        for head, states in enumerate(heads):
            plan = None if states.plan is None else states.plan.to_json()
            yield ContextHead(layer, head, states.keys, states.values, states.index, plan)


def _num_index_bytes(head: HeadStates) -> int:
    _, arrays = head.index.to_arrays()
    return sum(array.nbytes for array in arrays.values())


def _num_leased_bytes(file: ContextFile) -> int:
    """What has to be in memory at once: a block of anything, or an index with its keys."""
    sections = file.file.sections
    block = max(min(section.num_bytes, section.block_bytes) for section in sections.values())
    indexes = [set(entry["arrays"].values()) for entry in file.file.header["indexes"].values()]
    return max(block, *(sum(sections[name].num_bytes for name in names) for names in indexes))


def _write_queries(path: Path, layers: Sequence[Sequence[HeadStates]]) -> None:
    """Beside the context's file."""
    arrays = {
        _queries_name(layer, head): states.train_queries.data
        for layer, heads in enumerate(layers)
        for head, states in enumerate(heads)
        if states.train_queries is not None
    }
    try:
        write_sections(path.with_suffix(QUERIES_SUFFIX), {"content": "training queries"}, arrays)
    except OSError as error:
        logger.warning("training queries left out: %s", error)


def _queries_name(layer: int, head: int) -> str:
    return f"layers/{layer}/kv_heads/{head}/queries"
