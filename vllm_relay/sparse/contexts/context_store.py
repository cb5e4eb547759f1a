# SPDX-License-Identifier: Apache-2.0
"""Where a database keeps its contexts."""

from __future__ import annotations

import hashlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from vllm_relay.sparse.files.damage import IndexDamagedError
from vllm_relay.sparse.index.elements import Elements
from vllm_relay.sparse.index.key_index import KeyIndex
from vllm_relay.sparse.index.sparse_layer import SparseLayer, sparse_layer
from vllm_relay.sparse.plan.head_plan import HeadPlan


@dataclass(frozen=True)
class ContextShape:
    """What all layers of a context have in common; sizes are elements."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    value_size: int
    dtype: str


class Link(NamedTuple):
    """The tokens `begin` to `end` of a chain of contexts: the first own ones of `context`."""

    context: StoredContext
    begin: int
    end: int


class Parent(NamedTuple):
    """The first `num_tokens` tokens of a context, of which the last one is its own."""

    context: StoredContext
    num_tokens: int


class StoredContext(ABC):
    """The keys, values and indexes of a sequence of tokens; immutable, read by any number of
    threads.

    A context may continue another: then it has states of the tokens behind its parent's only, its
    own ones, and keeps the parent whole as long as it lives. Raises IndexDamagedError: what would
    have been read is damaged."""

    id: str
    tokens: np.ndarray
    shape: ContextShape
    parent: Parent | None = None
    _damage: str | None = None

    @property
    def num_tokens(self) -> int:
        """Those of the parent included."""
        return len(self.tokens)

    @property
    def own_begin(self) -> int:
        """The first token of its own."""
        return 0 if self.parent is None else self.parent.num_tokens

    @property
    def parent_id(self) -> str | None:
        return None if self.parent is None else self.parent.context.id

    @property
    def damage(self) -> str | None:
        """What was found wrong with it, or with what it continues; None so far."""
        if self._damage is not None or self.parent is None:
            return self._damage
        return self.parent.context.damage

    def links(self, end: int) -> list[Link]:
        """The contexts that have the first `end` tokens, in order."""
        links: list[Link] = []
        context, begin = self, self.own_begin
        while True:
            if begin < end:
                links.insert(0, Link(context, begin, end))
                end = begin
            if context.parent is None:
                return links
            context = context.parent.context
            begin = context.own_begin

    def first_tokens(self, num_tokens: int) -> Parent | None:
        """What another context continues; None for no tokens."""
        return Parent(self.links(num_tokens)[-1].context, num_tokens) if num_tokens else None

    def rows(self, layer: int, head: int, begin: int, end: int) -> tuple[Elements, Elements]:
        """Keys [end - begin, head_size] and values [end - begin, value_size] of a kv head."""
        parts = [
            link.context.own_rows(layer, head, max(begin - link.begin, 0), link.end - link.begin)
            for link in self.links(end)
            if link.end > begin
        ]
        if not parts:
            return self.own_rows(layer, head, 0, 0)
        keys, values = zip(*parts, strict=True)
        return _joined(keys), _joined(values)

    def queries(self, layer: int, head: int, begin: int, end: int) -> Elements | None:
        """As `train_queries`, of the tokens `begin` to `end`: as if those of a link were even."""
        parts = []
        for link in self.links(end):
            kept = link.context.train_queries(layer, head) if link.end > begin else None
            if kept is not None:
                num_own_tokens = link.context.num_tokens - link.begin
                first, last = (
                    kept.shape[0] * max(each - link.begin, 0) // num_own_tokens
                    for each in (begin, link.end)
                )
                parts.append(kept.rows(first, last))
        return _joined(parts) if sum(len(each.data) for each in parts) else None

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes of its own keys, values and indexes: in memory, or of the file."""

    @abstractmethod
    def own_rows(self, layer: int, head: int, begin: int, end: int) -> tuple[Elements, Elements]:
        """As `rows`, of its own tokens: 0 is the first of them. So it is for what follows."""

    def gather(
        self, layer: int, head: int, ids: list[np.ndarray]
    ) -> tuple[Elements, Elements, list[np.ndarray]]:
        """Keys and values in which the tokens `ids` may be read, and where they are in these."""
        raise NotImplementedError

    def index(self, layer: int, head: int) -> KeyIndex:
        """Over all own keys of a kv head."""
        raise NotImplementedError

    def layer(self, layer: int) -> SparseLayer | None:
        """All kv heads of a layer, which are searched and attended in one call; None where indexes
        are of other kinds or rows have to be gathered."""
        return None

    def pieces(self, layer: int) -> list[tuple[int, SparseLayer]]:
        """Which of its own tokens are indexed, for an engine: where indexes begin that do not
        overlap, in order. `native_rows` has the others."""
        whole = self.layer(layer)
        assert whole is not None, "contexts of an engine have relay's own indexes"
        return [(0, whole)]

    def native_rows(self, layer: int) -> Any:
        """Its own keys and values, as the C++ side has them, where not all are indexed."""
        raise NotImplementedError

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around searches of `index` or `layer`, here and of what it continues: damage that they
        find is remembered."""
        with noticing_damage([link.context for link in self.links(self.num_tokens)]):
            yield

    @property
    def file_names(self) -> tuple[str, ...]:
        """Under which its damage is told, the one it has now first; none of a context in memory."""
        return ()

    def check_size(self) -> None:
        """Raises IndexDamagedError: its file is shorter than it was; without a file all is well."""
        return

    def plan(self, layer: int, head: int) -> HeadPlan | None:
        """What the queries of a kv head are to ask, if that was planned."""
        return None

    @abstractmethod
    def train_queries(self, layer: int, head: int) -> Elements | None:
        """[m, head_size], in token order: what index and plan were made with, if that was kept; of
        its own tokens."""


@contextmanager
def noticing_damage(contexts: Sequence[StoredContext]) -> Iterator[None]:
    """Remembers of which of them the damage is that is found."""
    try:
        for each in contexts:
            each.check_size()
        yield
    except IndexDamagedError as error:
        message = str(error)
        in_files = [each for each in contexts if each.file_names]
        damaged = [each for each in in_files if any(name in message for name in each.file_names)]
        for each in damaged:
            each._damage = message
        if damaged or not in_files:
            raise
        # of what was searched, which knows no file: of several, all are suspected
        message = f"{' or '.join(each.file_names[0] for each in in_files)}: {message}"
        for each in in_files:
            each._damage = message
        raise IndexDamagedError(message) from error


@dataclass(frozen=True)
class HeadStates:
    """One kv head of one layer, on its way into a store."""

    keys: Elements
    values: Elements
    index: KeyIndex
    train_queries: Elements | None = None
    plan: HeadPlan | None = None


Layers = Sequence[Sequence[HeadStates]]
"""`layers[layer][kv head]`"""


class ParentGoneError(ValueError):
    """What a context would have continued is not stored any more."""


class ContextStore(ABC):
    """Contexts by id. Deleting one leaves it whole for those that hold it."""

    @property
    def skipped(self) -> dict[str, str]:
        """Path of each file that cannot be used, and why."""
        return {}

    @abstractmethod
    def add(
        self, tokens: np.ndarray, layers: Layers, parent: Parent | None = None
    ) -> StoredContext:
        """Keeps a context; or returns the one with the same tokens.

        Args:
            tokens: those of the parent included.
            layers: the states of the tokens behind the parent's.
            parent: as `parent_here` returned it.

        Raises:
            ParentGoneError: the parent was deleted meanwhile.
        """

    @abstractmethod
    def parent_here(self, parent: Parent) -> Parent | None:
        """The same tokens, as what this store adds can continue them; None: it cannot."""

    @abstractmethod
    def contexts(self) -> list[StoredContext]:
        """In the order in which they came."""

    @abstractmethod
    def delete(self, context_id: str) -> None:
        """What continues it goes on. Raises KeyError: no such context."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of all contexts."""


class MemoryContext(StoredContext):
    """A context in arrays of this process."""

    def __init__(self, tokens: np.ndarray, layers: Layers, parent: Parent | None = None) -> None:
        self.id = context_id_of(tokens)
        self.tokens = tokens
        self.parent = parent
        first = layers[0][0]
        self.shape = ContextShape(
            num_layers=len(layers),
            num_kv_heads=len(layers[0]),
            head_size=first.keys.shape[1],
            value_size=first.values.shape[1],
            dtype=first.keys.dtype,
        )
        self._layers = [list(heads) for heads in layers]
        # at once: the step that reads it first would wait for the means of its values
        self._sparse_layers = [
            sparse_layer([head.index for head in heads], [head.values for head in heads])
            for heads in layers
        ]
        self._num_bytes = tokens.nbytes + sum(
            num_bytes_of(head) for heads in layers for head in heads
        )

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def own_rows(self, layer: int, head: int, begin: int, end: int) -> tuple[Elements, Elements]:
        states = self._layers[layer][head]
        return states.keys.rows(begin, end), states.values.rows(begin, end)

    def gather(
        self, layer: int, head: int, ids: list[np.ndarray]
    ) -> tuple[Elements, Elements, list[np.ndarray]]:
        states = self._layers[layer][head]
        return states.keys, states.values, ids

    def index(self, layer: int, head: int) -> KeyIndex:
        return self._layers[layer][head].index

    def layer(self, layer: int) -> SparseLayer | None:
        return self._sparse_layers[layer]

    def plan(self, layer: int, head: int) -> HeadPlan | None:
        return self._layers[layer][head].plan

    def train_queries(self, layer: int, head: int) -> Elements | None:
        return self._layers[layer][head].train_queries


class MemoryContextStore(ContextStore):
    """Contexts that live as long as this process."""

    def __init__(self) -> None:
        self._contexts: dict[str, StoredContext] = {}
        self._lock = threading.Lock()

    def add(
        self, tokens: np.ndarray, layers: Layers, parent: Parent | None = None
    ) -> StoredContext:
        context = MemoryContext(tokens, layers, parent)
        with self._lock:
            return self._contexts.setdefault(context.id, context)

    def parent_here(self, parent: Parent) -> Parent | None:
        with self._lock:
            context = self._contexts.get(parent.context.id, parent.context)
        return context.first_tokens(parent.num_tokens)

    def contexts(self) -> list[StoredContext]:
        with self._lock:
            return list(self._contexts.values())

    def delete(self, context_id: str) -> None:
        with self._lock:
            del self._contexts[context_id]

    def close(self) -> None:
        with self._lock:
            self._contexts.clear()


def context_id_of(tokens: np.ndarray) -> str:
    """The same tokens have the same id, in every process."""
    return hashlib.sha256(np.ascontiguousarray(tokens, "<i8").tobytes()).hexdigest()[:32]


def _joined(parts: Sequence[Elements]) -> Elements:
    if len(parts) == 1:
        return parts[0]
    return Elements(np.concatenate([each.data for each in parts]), parts[0].dtype)


def num_bytes_of(head: HeadStates) -> int:
    """Keys that the index shares with the context count once."""
    _, arrays = head.index.to_arrays()
    owned = [head.keys.data, head.values.data, *arrays.values()]
    if head.train_queries is not None:
        owned.append(head.train_queries.data)
    distinct = {(array.__array_interface__["data"][0], array.nbytes) for array in owned}
    return sum(nbytes for _, nbytes in distinct)
