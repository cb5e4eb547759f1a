# SPDX-License-Identifier: Apache-2.0
"""A context in a file, and its training queries beside it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vllm_relay.sparse.contexts.context_store import (
    ContextShape,
    Layers,
    Parent,
    StoredContext,
    context_id_of,
    noticing_damage,
)
from vllm_relay.sparse.contexts.disk.context_file import QUERIES_SUFFIX, ContextFile
from vllm_relay.sparse.contexts.tokens import TOKEN_DTYPE
from vllm_relay.sparse.files.buffer_pool import BufferPoolFullError
from vllm_relay.sparse.files.damage import IndexDamagedError
from vllm_relay.sparse.files.section_file import SectionFile, SectionReader, write_sections
from vllm_relay.sparse.index.compiled_index import CompiledIndex
from vllm_relay.sparse.index.elements import STORAGE, Elements, check_finite
from vllm_relay.sparse.index.key_index import KeyIndex
from vllm_relay.sparse.index.sparse_layer import SparseLayer, sparse_layer
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
        # by pages: a pool need not have room for all of them
        self.tokens = file.file.rows("tokens").range(0, file.num_tokens).astype(TOKEN_DTYPE)
        self.id = context_id_of(self.tokens)
        self.shape = ContextShape(
            num_layers=file.fingerprint.num_layers,
            num_kv_heads=file.fingerprint.num_kv_heads,
            head_size=file.fingerprint.head_size,
            value_size=file.rows(0, 0, "values").shape[1],
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
    def file_names(self) -> tuple[str, ...]:
        # a page is named by what its file was called when it was opened
        return str(self.path), str(self._file.path)

    def check_size(self) -> None:
        if not self._is_pooled:
            self._file.file.check_size()

    def own_rows(self, layer: int, head: int, begin: int, end: int) -> tuple[Elements, Elements]:
        with self._reading_file():
            keys, values = (each.range(begin, end) for each in self._states(layer, head))
        return self._elements(keys), self._elements(values)

    def gather(
        self, layer: int, head: int, ids: list[np.ndarray]
    ) -> tuple[Elements, Elements, list[np.ndarray]]:
        seen = np.unique(np.concatenate(ids))
        keys, values = self._states(layer, head)
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
                index = self._file.index(layer, head)
                if isinstance(index, CompiledIndex) and not (
                    self._file.indexes_own_keys(layer, head)
                    and index.keys_dtype == self.shape.dtype
                ):
                    raise IndexDamagedError(
                        f"{self.path}: an index of other keys than those of its head"
                    )
            if not self._is_pooled:
                self._indexes[layer, head] = index
        return index

    def layer(self, layer: int) -> SparseLayer | None:
        if self._is_pooled:
            return None
        if layer not in self._layers:
            indexes = [self.index(layer, head) for head in range(self.shape.num_kv_heads)]
            values, guards, means = [], [], []
            with noticing_damage([self]):
                for head in range(len(indexes)):
                    array, guard = self._file.rows(layer, head, "values").by_row()
                    values.append(self._elements(array))
                    guards.append(guard)
                    means.append(
                        self._elements(self._file.rows(layer, head, "value_means").whole())
                    )
                    try:
                        check_finite(f"layer {layer}, kv head {head}: value_means", means[-1])
                    except ValueError as error:
                        raise IndexDamagedError(f"{self._file.path}: {error}") from error
            self._layers[layer] = sparse_layer(indexes, values, means, guards)
        return self._layers[layer]

    def _states(self, layer: int, head: int) -> tuple[SectionReader, SectionReader]:
        return self._file.rows(layer, head, "keys"), self._file.rows(layer, head, "values")

    @contextmanager
    def _reading_file(self) -> Iterator[None]:
        """As `reading` its own file; of a pool that is full the option that limits it is told."""
        try:
            with noticing_damage([self]):
                yield
        except BufferPoolFullError as error:
            raise BufferPoolFullError(
                f"memory_limit_bytes is too small for what is read at the same time: {error}"
            ) from None

    def plan(self, layer: int, head: int) -> HeadPlan | None:
        place = layer, head
        if place not in self._plans:
            content = self._file.plan(layer, head)
            try:
                self._plans[place] = None if content is None else HeadPlan.from_json(content)
            except ValueError as error:
                # another version wrote it; without a plan it is read correctly
                logger.warning("%s: plan left out: %s", self.path, error)
                self._plans[place] = None
        return self._plans[place]

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
        path = self.path.with_suffix(QUERIES_SUFFIX)
        if queries.dtype != STORAGE[dtype] or queries.ndim != 2 or queries.shape[1] != size:
            raise ValueError(
                f"{path}: {queries.dtype} {list(queries.shape)}, expected {dtype} [m, {size}]"
            )
        elements = self._elements(queries)
        check_finite(str(path), elements)
        return elements

    def _elements(self, data: np.ndarray) -> Elements:
        return Elements(data, self.shape.dtype)


def write_queries(path: Path, layers: Layers) -> None:
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
