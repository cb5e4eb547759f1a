# SPDX-License-Identifier: Apache-2.0
"""An index that looks at every key in float64: the twin of the real ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.support import reference
from vllm_relay._C import PageGuard
from vllm_relay.sparse import KeyIndex, QueryType, SearchResult, SearchStats
from vllm_relay.sparse.index.elements import Elements, as_elements
from vllm_relay.sparse.index.key_index import NO_GUARDS
from vllm_relay.sparse.index.query_types import softmax_scale


class BruteForceIndex(KeyIndex):
    """`KeyIndex` by `reference.search`; remembers what it was built with."""

    kind = "brute force"

    def __init__(self) -> None:
        self._keys: Elements | None = None
        self.train_queries: Elements | None = None

    @property
    def keys(self) -> Elements:
        assert self._keys is not None
        return self._keys

    def build(
        self,
        keys: Any,
        train_queries: Any = None,
        *,
        seed: int = 0,
        threads: int | None = None,
    ) -> BruteForceIndex:
        self._keys = as_elements("keys", keys)
        if train_queries is not None:
            self.train_queries = as_elements("train_queries", train_queries)
        return self

    def search(
        self,
        queries: Any,
        query: QueryType,
        *,
        begin: int = 0,
        prefix_len: int | None = None,
        window_max: Any = None,
    ) -> SearchResult:
        rows, keys = np.asarray(queries), self.keys.to_float32()
        ids, scores = reference.search(
            rows, keys, query, begin=begin, prefix_len=prefix_len, window_max=window_max
        )
        counted = keys[begin:prefix_len]
        dropped = None
        if query.max_dropped_mass is not None:
            scale = softmax_scale(query, self.head_size)
            places = [row - begin for row in ids]
            dropped = reference.dropped_mass(rows, counted, places, scale=scale)
            dropped = np.maximum(dropped, 0).astype(np.float32)
        return SearchResult(
            ids,
            [row.astype(np.float32) for row in scores],
            SearchStats(len(counted), 1, self.keys.data[begin:prefix_len].nbytes, dropped),
        )

    def check(self) -> None:
        pass

    def to_arrays(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        return {"dtype": self.keys.dtype}, {"keys": self.keys.data}

    @classmethod
    def from_arrays(
        cls,
        settings: dict[str, Any],
        arrays: dict[str, np.ndarray],
        guards: Mapping[str, PageGuard] = NO_GUARDS,
    ) -> BruteForceIndex:
        return cls().build(Elements(arrays["keys"], settings["dtype"]))
