# SPDX-License-Identifier: Apache-2.0
"""Sparse attention: the keys of long contexts in an index on the CPU, of which a query reads only
what matters (docs/key-index.md)."""

import importlib
from typing import TYPE_CHECKING, Any

from vllm_relay.sparse.blocks import BlockIndex
from vllm_relay.sparse.coarse import CoarseIndex
from vllm_relay.sparse.cost_calibration import calibrate_costs
from vllm_relay.sparse.flat import FlatIndex
from vllm_relay.sparse.graph import GraphIndex
from vllm_relay.sparse.index import IndexDamagedError, KeyIndex, SearchResult, SearchStats
from vllm_relay.sparse.query_types import Dipr, QueryType, TopK

if TYPE_CHECKING:
    from vllm_relay.sparse.db import DB
    from vllm_relay.sparse.options import DBOptions
    from vllm_relay.sparse.session import Session

__all__ = [
    "DB",
    "DBOptions",
    "BlockIndex",
    "CoarseIndex",
    "Dipr",
    "FlatIndex",
    "GraphIndex",
    "IndexDamagedError",
    "KeyIndex",
    "QueryType",
    "SearchResult",
    "SearchStats",
    "Session",
    "TopK",
    "calibrate_costs",
]

# these load torch and transformers
_ON_DEMAND = {
    "DB": "vllm_relay.sparse.db",
    "DBOptions": "vllm_relay.sparse.options",
    "Session": "vllm_relay.sparse.session",
}


def __getattr__(name: str) -> Any:
    if name not in _ON_DEMAND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_ON_DEMAND[name]), name)
