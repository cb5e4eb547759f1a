# SPDX-License-Identifier: Apache-2.0
"""The contract of every key index."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from vllm_relay._C import PageGuard
from vllm_relay.sparse.files.damage import IndexDamagedError
from vllm_relay.sparse.files.section_file import SectionFile, write_sections
from vllm_relay.sparse.index.elements import Elements
from vllm_relay.sparse.index.query_types import QueryType

if TYPE_CHECKING:
    from typing_extensions import Self


NO_GUARDS: Mapping[str, PageGuard] = MappingProxyType({})


class SearchStats(NamedTuple):
    """What a search of `g` queries cost, all of them together.

    Attributes:
        distances: keys that were scored, each counted once however many queries scored it.
        hops: graph nodes expanded, lists probed or blocks read.
        bytes: of keys, codes and adjacency that were read.
        dropped_mass: float32 [g] where the query has `max_dropped_mass`: at most this much of the
            attention weight of the keys that count was left out.
    """

    distances: int
    hops: int
    bytes: int
    dropped_mass: np.ndarray | None = None


class SearchResult(NamedTuple):
    """`ids[i]` (int32) and `scores[i]` (float32) belong to query i, best first; equal scores in
    the order of their ids."""

    ids: list[np.ndarray]
    scores: list[np.ndarray]
    stats: SearchStats


class KeyIndex(ABC):
    """The keys of one kv head of one context, in token order, searched by inner product.

    An index is immutable; any number of threads may search it at once.
    """

    kind: ClassVar[str]
    read_by_row: ClassVar[frozenset[str]] = frozenset()
    """Of `to_arrays`, those of which a search reads rows here and there."""

    @property
    @abstractmethod
    def keys(self) -> Elements:
        """[n, d], as stored; scores are inner products with these. Verified as a whole."""

    @property
    def num_keys(self) -> int:
        return self.keys.shape[0]

    @property
    def head_size(self) -> int:
        return self.keys.shape[1]

    @abstractmethod
    def build(
        self,
        keys: Any,
        train_queries: Any = None,
        *,
        seed: int = 0,
        threads: int | None = None,
    ) -> Self:
        """Indexes `keys` and returns itself.

        Args:
            keys: [n, d] in token order; n >= 1. Kept in the dtype they are given in (float64 as
                float32), and not copied where that is possible: do not write to them afterwards.
            train_queries: [m, d]; queries of the kind that will be asked, of every query head that
                shares the index. Indexes that do not learn from queries ignore them.
            seed: the result depends on the arguments and this number only.
            threads: None: every core of this process. The result does not depend on it.

        Raises:
            ValueError: an argument is unusable (wrong shape, NaN, no keys); names it.
        """

    @abstractmethod
    def search(
        self,
        queries: Any,
        query: QueryType,
        *,
        begin: int = 0,
        prefix_len: int | None = None,
        window_max: Any = None,
    ) -> SearchResult:
        """Finds the keys that each query asks for, in one pass for all of them.

        Args:
            queries: [g, d]; the query heads of the group that shares these keys.
            query: `TopK` or `Dipr`.
            begin: keys before this one do not count (attention sinks, which are read anyway).
            prefix_len: only keys of the first `prefix_len` tokens count; None for all.
            window_max: [g]; the largest inner product each query has outside this index. A `Dipr`
                range reaches down from the larger one of it and the index's own maximum.

        Raises:
            ValueError: an argument is unusable; names it.
        """

    @abstractmethod
    def check(self) -> None:
        """Looks at every byte of the index for what a search relies on.

        Raises:
            IndexDamagedError: lists what is wrong.
        """

    @abstractmethod
    def to_arrays(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """(settings that JSON can hold, named arrays): all that `from_arrays` needs."""

    @classmethod
    @abstractmethod
    def from_arrays(
        cls,
        settings: dict[str, Any],
        arrays: dict[str, np.ndarray],
        guards: Mapping[str, PageGuard] = NO_GUARDS,
    ) -> Self:
        """The index that `to_arrays` described. Arrays are used where they lie (they may be
        read-only maps of a file) and not looked at.

        Args:
            guards: of arrays in `read_by_row` that are not verified yet: a row of them is read
                after its guard has passed it.

        Raises:
            IndexDamagedError: shapes, dtypes or settings do not fit together.
        """

    def save(self, path: str | Path) -> None:
        """Writes one file, atomically: it is there whole or not at all."""
        settings, arrays = self.to_arrays()
        write_sections(path, {"content": "key index", "kind": self.kind, **settings}, arrays)

    @classmethod
    def load(cls, path: str | Path, *, mmap: bool = True) -> Self:
        """Opens what `save` wrote.

        Args:
            mmap: read what is needed when it is needed, and verify it at the first touch;
                otherwise everything is read now.

        Raises:
            IndexDamagedError: not such a file, damaged, or of another kind of index.
        """
        with SectionFile.open(path, mmap=mmap) as file:
            header = dict(file.header)
            found = (header.pop("content", None), header.pop("kind", None))
            if found != ("key index", cls.kind):
                raise IndexDamagedError(f"{path}: holds {found}, expected a {cls.kind} key index")
            names = {name: name for name in file.names}
            return cls.from_arrays(header, *file.arrays(names, cls.read_by_row))
