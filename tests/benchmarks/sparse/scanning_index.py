# SPDX-License-Identifier: Apache-2.0
"""A key index that looks at every `stride`-th key only, fewer the smaller the width."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.sparse.brute_force_index import BruteForceIndex
from tests.support import reference
from vllm_relay.sparse import QueryType, SearchResult, SearchStats
from vllm_relay.sparse.index.query_types import softmax_scale

WIDTH_OF_ALL = 400


class ScanningIndex(BruteForceIndex):
    kind = "scanning"

    def search(
        self,
        queries: Any,
        query: QueryType,
        *,
        begin: int = 0,
        prefix_len: int | None = None,
        entry: Any = None,
        window_max: Any = None,
    ) -> SearchResult:
        stride = max(1, WIDTH_OF_ALL // (query.width or WIDTH_OF_ALL))
        end = self.num_keys if prefix_len is None else prefix_len
        seen = np.arange(begin, end)[::stride]
        keys = self.keys.to_float32()
        if window_max is not None:
            assert len(window_max) == len(queries)
        ids, scores = reference.search(queries, keys[seen], query, window_max=window_max)
        dropped = None
        if query.max_dropped_mass is not None:
            # also of the keys that were not looked at
            places = [seen[i] - begin for i in ids]
            scale = softmax_scale(query, self.head_size)
            dropped = reference.dropped_mass(queries, keys[begin:end], places, scale=scale)
            dropped = np.maximum(dropped, 0).astype(np.float32)
        stats = SearchStats(len(seen), 1, keys[seen].nbytes, dropped)
        return SearchResult([seen[i].astype(np.int32) for i in ids], scores, stats)

    def to_arrays(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        settings, arrays = super().to_arrays()
        return settings, {**arrays, "order": np.arange(self.num_keys, dtype=np.int32)}
