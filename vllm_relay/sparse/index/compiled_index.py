# SPDX-License-Identifier: Apache-2.0
"""What the faces of the C++ indexes share: the search itself and the checks of arguments."""

from __future__ import annotations

import math
import os
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from vllm_relay import _C
from vllm_relay._C import PageGuard
from vllm_relay.sparse.files.damage import IndexDamagedError, require
from vllm_relay.sparse.index.elements import Elements, as_elements, check_finite
from vllm_relay.sparse.index.key_codes import (
    MAX_HEAD_SIZE,
    KeyCodes,
    check_codes,
    encode,
    restore_codes,
    split_codes,
)
from vllm_relay.sparse.index.key_index import (
    NO_GUARDS,
    KeyIndex,
    SearchResult,
    SearchStats,
)
from vllm_relay.sparse.index.query_types import Dipr, QueryType, TopK, softmax_scale

if TYPE_CHECKING:
    from typing_extensions import Self

NO_IDS = np.zeros(0, np.int32)


class CodedKeys(NamedTuple):
    """Keys [n, d], how they became codes, and these: uint8 [n, row_bytes]."""

    keys: Elements
    codes: KeyCodes
    rows: np.ndarray


class CompiledIndex(KeyIndex):
    """What the indexes whose searches are C++ have in common.

    Attributes:
        searcher: the C++ side.
        default_width: where a query says none.
        entries: int32; where searches begin.
        hop_bytes: read at every hop.
    """

    own_settings: ClassVar[tuple[str, ...]] = ("default_width",)
    """Attributes that are stored."""
    own_arrays: ClassVar[tuple[str, ...]]
    """What is stored besides keys and what makes codes of them."""
    searcher: Any
    default_width = 1
    entries = NO_IDS
    hop_bytes = 0
    _keys: Elements
    _codes: KeyCodes
    _arrays: Mapping[str, np.ndarray]
    _exact: Any = None
    _guards: Mapping[str, PageGuard] = NO_GUARDS

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__") and "_keys" not in self.__dict__:
            raise RuntimeError(f"this {type(self).__name__} holds no keys: build it or load one")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def keys(self) -> Elements:
        self._verify("keys")
        return self._keys

    @property
    def num_keys(self) -> int:
        return self._keys.shape[0]

    @property
    def head_size(self) -> int:
        return self._keys.shape[1]

    @property
    def keys_dtype(self) -> str:
        return self._keys.dtype

    def _key_set(self, name: str) -> Any:
        """Of the keys and their codes, the array of that name."""
        key_guard, code_guard = self._guards.get("keys"), self._guards.get(name)
        codes = self._arrays[name]
        return self._codes.key_set(self._keys, codes, key_guard=key_guard, code_guard=code_guard)

    def _verify(self, *names: str) -> None:
        """Makes sure that these arrays, or all, are whole: they may lie in a file. Raises
        IndexDamagedError: names file, section and page."""
        for name in names or self._guards:
            if name in self._guards:
                self._guards[name].verify_all()

    def build(
        self,
        keys: Any,
        train_queries: Any = None,
        *,
        seed: int = 0,
        threads: int | None = None,
    ) -> Self:
        elements, num_threads = check_keys(keys), check_threads(threads)
        coded = CodedKeys(elements, *encode(elements, num_threads))
        keys_before, before = self.__dict__.get("_keys"), (self._exact, self._guards)
        self._exact, self._guards = None, NO_GUARDS  # those of the keys before
        try:
            self._build(coded, train_queries, seed, num_threads)
        except BaseException:
            if self.__dict__.get("_keys") is keys_before:  # it still is what it was
                self._exact, self._guards = before
            raise
        return self

    @abstractmethod
    def _build(self, coded: CodedKeys, train_queries: Any, seed: int, threads: int) -> None:
        """What `build` does with keys that are usable."""

    def _set(self, keys: Elements, codes: KeyCodes, arrays: Mapping[str, np.ndarray]) -> None:
        """Args: arrays: `own_arrays`, which fit."""
        self._keys, self._codes, self._arrays = keys, codes, arrays
        self.searcher = self._new_searcher()

    @abstractmethod
    def _new_searcher(self) -> Any:
        """The C++ side of what was set."""

    def check(self) -> None:
        self._verify()
        if not self._has_codes(check_codes(self._keys, self._codes)):
            raise IndexDamagedError(f"{self.kind} index: its codes do not belong to its keys")

    @abstractmethod
    def _has_codes(self, rows: np.ndarray) -> bool:
        """Whether its codes are these, uint8 [n, row_bytes], and all else is right. Raises
        IndexDamagedError: something else is not."""

    def to_arrays(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        self._verify()
        settings, arrays = self._codes.to_arrays()
        own_settings = {name: getattr(self, name) for name in self.own_settings}
        arrays |= {"keys": self._keys.data, **self._arrays}
        return {"dtype": self._keys.dtype, **own_settings, **settings}, arrays

    @classmethod
    def from_arrays(
        cls,
        settings: dict[str, Any],
        arrays: dict[str, np.ndarray],
        guards: Mapping[str, PageGuard] = NO_GUARDS,
    ) -> Self:
        try:
            keys, codes = restore_codes(settings, arrays)
            index = cls._unbuilt(settings)
            index._keys, index._codes, index._guards = keys, codes, guards
            own = {name: arrays[name] for name in cls.own_arrays}
            require(index._fits(settings, own), f"{cls.kind} index: its arrays do not fit together")
            index._set(keys, codes, own)
            for name in cls.own_settings:
                setattr(index, name, settings[name])
        except IndexDamagedError:
            raise
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise IndexDamagedError(
                f"{cls.kind} index: {error!r} is missing or unusable"
            ) from error
        return index

    @classmethod
    def _unbuilt(cls, settings: dict[str, Any]) -> Self:
        """An index like the one that has these settings."""
        return cls()

    @abstractmethod
    def _fits(self, settings: dict[str, Any], arrays: dict[str, np.ndarray]) -> bool:
        """Whether a search may go by these settings and `own_arrays`; keys and codes are there.
        Raises IndexDamagedError, KeyError, TypeError, ValueError: why not."""

    def search(
        self,
        queries: Any,
        query: QueryType,
        *,
        begin: int = 0,
        prefix_len: int | None = None,
        window_max: Any = None,
    ) -> SearchResult:
        n, d = self._keys.shape
        queries = check_queries("queries", queries, d)
        k, reach = query_numbers(query, n, d)
        if window_max is not None:
            window_max = check_window_max(window_max, (len(queries),))
        searcher = self.searcher if query.max_dropped_mass is None else self.exact_searcher
        prefix_len = check_prefix(prefix_len, n)
        ids, scores, dropped_mass, distances, hops, rescored, code_bytes = searcher.search(
            queries, k, reach, self.width_of(query), window_max, check_begin(begin, prefix_len),
            prefix_len, self.entries, softmax_scale(query, d), mass_limit(query),
        )  # fmt: skip
        stats = self.stats(distances, hops, rescored, code_bytes, dropped_mass)
        return SearchResult(ids, scores, stats)

    def width_of(self, query: QueryType) -> int:
        """How much a search looks at: what the query says, or as much as seems right."""
        return self.default_width if query.width is None else query.width

    @property
    def exact_searcher(self) -> Any:
        """Reads the codes of all keys, as the one of a flat index."""
        if self._exact is None:
            keys = self.keys
            try:
                codes, rows = encode(keys, check_threads(None))
            except ValueError as error:
                raise IndexDamagedError(f"{self.kind} index: {error}") from error
            upper, lower = split_codes(rows)
            key_set = codes.key_set(self.keys, upper)
            self._exact = _C.index.FlatSearcher("auto", key_set, codes.outside, lower)
        return self._exact

    def stats(
        self,
        distances: int,
        hops: int,
        rescored: int,
        code_bytes: int,
        dropped_mass: np.ndarray | None = None,
    ) -> SearchStats:
        """What a search cost, from what the C++ side counts."""
        read = code_bytes + hops * self.hop_bytes + rescored * key_bytes(self._keys)
        return SearchStats(distances, hops, read, dropped_mass)


def check_keys(keys: Any) -> Elements:
    """[n, d] with n >= 1, finite."""
    elements = as_elements("keys", keys)
    if len(elements.shape) != 2:
        raise ValueError(f"keys: shape {list(elements.shape)}, expected [keys, head_size]")
    n, d = elements.shape
    if n < 1:
        raise ValueError("keys: there are none, expected at least one")
    if n >= 2**31:
        raise ValueError(f"keys: {n} of them, expected fewer than {2**31}")
    if not 1 <= d <= MAX_HEAD_SIZE:
        raise ValueError(f"keys: head_size {d}, expected 1 to {MAX_HEAD_SIZE}")
    return elements


def check_queries(name: str, queries: Any, head_size: int, *, dims: int = 2) -> np.ndarray:
    """float32 [..., head_size] of `dims` dimensions; the C++ side refuses what is not finite."""
    usable = isinstance(queries, np.ndarray) and queries.dtype == np.float32
    if not (usable and queries.flags.c_contiguous):
        queries = as_elements(name, queries).to_float32()
    if queries.ndim != dims or queries.shape[-1] != head_size:
        leading = "[queries, " if dims == 2 else "[kv_heads, queries, "
        raise ValueError(f"{name}: shape {list(queries.shape)}, expected {leading}{head_size}]")
    return queries


def check_train_queries(queries: Any, head_size: int) -> np.ndarray:
    """float32 [m, head_size], finite."""
    queries = check_queries("train_queries", queries, head_size)
    check_finite("train_queries", Elements(queries, "float32"))
    return queries


def check_threads(threads: int | None) -> int:
    if threads is None:
        return len(os.sched_getaffinity(0))
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise ValueError(f"threads is {threads!r}, expected a whole number >= 1 or None")
    return threads


def query_numbers(query: QueryType, num_keys: int, head_size: int) -> tuple[int, float]:
    """(k or 0, range or -1)."""
    if isinstance(query, TopK):
        return min(query.k, num_keys), -1.0
    if not isinstance(query, Dipr):
        raise ValueError(f"query is {query!r}, expected TopK or Dipr")
    return 0, query.range(head_size)


def check_window_max(window_max: Any, shape: tuple[int, ...]) -> np.ndarray:
    try:
        window_max = np.asarray(window_max)
        if window_max.dtype.kind not in "fiu":
            raise ValueError(f"dtype {window_max.dtype}, expected numbers")
        window_max = np.ascontiguousarray(window_max, np.float32)
    except ValueError as error:
        raise ValueError(f"window_max: {error}") from error
    if window_max.shape != shape:
        raise ValueError(f"window_max: shape {list(window_max.shape)}, expected {list(shape)}")
    if not (window_max < np.inf).all():
        raise ValueError("window_max: NaN or infinity, expected finite numbers or -infinity")
    return window_max


def check_prefix(prefix_len: int | None, num_keys: int) -> int:
    if prefix_len is None:
        return num_keys
    if isinstance(prefix_len, bool) or not isinstance(prefix_len, int | np.integer):
        raise ValueError(f"prefix_len is {prefix_len!r}, expected a whole number or None")
    if not 0 <= prefix_len <= num_keys:
        raise ValueError(f"prefix_len is {prefix_len}, expected 0 to {num_keys}")
    return int(prefix_len)


def mass_limit(query: QueryType) -> float:
    """What the C++ side is told; NaN: no limit."""
    return math.nan if query.max_dropped_mass is None else query.max_dropped_mass


def check_begin(begin: int, prefix_len: int) -> int:
    # most are plain ints, and unions are slow to ask about
    if type(begin) is not int and (isinstance(begin, bool) or not isinstance(begin, np.integer)):
        raise ValueError(f"begin is {begin!r}, expected a whole number >= 0")
    if begin < 0:
        raise ValueError(f"begin is {begin}, expected a whole number >= 0")
    return min(int(begin), prefix_len)


def key_bytes(keys: Elements) -> int:
    return keys.shape[1] * keys.data.itemsize
