# SPDX-License-Identifier: Apache-2.0
"""Sparse attention: the keys of long contexts in an index on the CPU, of which a query reads only
what matters (docs/key-index.md).

    files/               arrays in files, verified by page                       (numpy, _C)
    index/               indexes over keys, and attention over what they find    (numpy, _C)
    plan/                which index a kv head gets                              (numpy, _C)
    contexts/            stored contexts                                         (torch)
    transformers/        the context database for models of transformers         (torch)
"""

import importlib
from typing import TYPE_CHECKING, Any

from vllm_relay.sparse.index.blocks import BlockIndex
from vllm_relay.sparse.index.coarse import CoarseIndex
from vllm_relay.sparse.index.flat import FlatIndex
from vllm_relay.sparse.index.graph import GraphIndex
from vllm_relay.sparse.index.key_index import IndexDamagedError, KeyIndex, SearchResult, SearchStats
from vllm_relay.sparse.index.query_types import Dipr, QueryType, TopK
from vllm_relay.sparse.plan.cost_calibration import calibrate_costs

if TYPE_CHECKING:
    from vllm_relay.sparse.plan.options import DBOptions
    from vllm_relay.sparse.transformers.db import DB
    from vllm_relay.sparse.transformers.session import Session

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
    "DB": "vllm_relay.sparse.transformers.db",
    "DBOptions": "vllm_relay.sparse.plan.options",
    "Session": "vllm_relay.sparse.transformers.session",
}


def __getattr__(name: str) -> Any:
    if name not in _ON_DEMAND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_ON_DEMAND[name]), name)
