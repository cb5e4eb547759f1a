# SPDX-License-Identifier: Apache-2.0
"""A key index that looks at every `stride`-th key only, fewer the smaller the width."""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_relay.sparse import KeyIndex, QueryType, SearchResult, SearchStats, reference
from vllm_relay.sparse.elements import Elements, as_elements

WIDTH_OF_ALL = 400


class ScanningIndex(KeyIndex):
    kind = "scanning"

    @property
    def keys(self) -> Elements:
        return self._keys

    def build(self, keys: Any, train_queries: Any = None, **_: Any) -> ScanningIndex:
        self._keys = as_elements("keys", keys)
        return self

    def search(
        self,
        queries: Any,
        query: QueryType,
        *,
        prefix_len: int | None = None,
        entry: Any = None,
        window_max: Any = None,
    ) -> SearchResult:
        stride = max(1, WIDTH_OF_ALL // (query.width or WIDTH_OF_ALL))
        seen = np.arange(prefix_len or self.num_keys)[::stride]
        ids, scores = reference.search(queries, self._keys.data[seen], query, window_max=window_max)
        if window_max is not None:
            assert len(window_max) == len(queries)
        stats = SearchStats(len(seen), 1, len(seen) * 4 * self.head_size)
        return SearchResult([seen[i].astype(np.int32) for i in ids], scores, stats)

    def append(self, keys: Any) -> None:
        raise NotImplementedError

    def check(self) -> None:
        raise NotImplementedError

    def to_arrays(self) -> Any:
        raise NotImplementedError

    @classmethod
    def from_arrays(cls, settings: Any, arrays: Any) -> ScanningIndex:
        raise NotImplementedError
