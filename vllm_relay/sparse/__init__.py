# SPDX-License-Identifier: Apache-2.0
"""Sparse attention: the keys of long contexts in an index on the CPU, of which a query reads only
what matters (docs/sparse.md)."""

from vllm_relay.sparse.coarse import CoarseIndex
from vllm_relay.sparse.flat import FlatIndex
from vllm_relay.sparse.graph import GraphIndex
from vllm_relay.sparse.index import IndexDamagedError, KeyIndex, SearchResult, SearchStats
from vllm_relay.sparse.query_types import Dipr, QueryType, TopK

__all__ = [
    "CoarseIndex",
    "Dipr",
    "FlatIndex",
    "GraphIndex",
    "IndexDamagedError",
    "KeyIndex",
    "QueryType",
    "SearchResult",
    "SearchStats",
    "TopK",
]
