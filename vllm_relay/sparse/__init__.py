# SPDX-License-Identifier: Apache-2.0
"""Sparse attention: the keys of long contexts in an index on the CPU, of which a query reads only
what matters (docs/key-index.md).

    query_types.py       TopK, Dipr                                                    (pure)
    elements.py, aligned.py   keys and values as numpy arrays                          (numpy)
    index.py, reference.py    KeyIndex, the contract, and its float64 oracle           (numpy, _C)
    key_codes.py         keys in eight bits                                            (numpy, _C)
    face.py              what the faces of the C++ indexes share                       (numpy, _C)
    flat.py, blocks.py, coarse.py, graph.py, calibrate.py   the indexes                (numpy, _C)
    value_means.py                 of values that are not read one by one               (numpy, _C)
    nearest.py, train_queries.py   what graphs are built from                          (numpy, _C)
    attention.py, partial_attention.py   attention over what a layer's indexes find    (numpy, _C)
    head_profile.py      what a head's queries need of its keys                        (numpy)
    planner.py, search_candidates.py, search_cost.py, options.py
                         which index a head gets, by what searches cost                (pure)
    answer_errors.py     how far off attention with the best keys alone is             (numpy)
    error_bound.py       how large the p99 of errors may be, going by a sample         (numpy)
    index_measure.py, index_timing.py, cost_calibration.py
                         what searches find, take and cost, measured                   (numpy, _C)
    index_choice.py, prefix_planner.py, head_plan.py   plans of a stored context       (numpy, _C)
    section_file.py, section_readers.py, section_table.py, section_writer.py, damage.py,
    checksum.py, buffer_pool.py   files of arrays, verified by page
    context_file.py, context_fingerprint.py, model_fingerprint.py   a stored context on such a file
    context_store.py, disk_context_store.py, db.py   contexts in memory and in a folder (torch)
    session.py, session_layer.py, session_states.py, state_buffer.py, retrieval.py, hf.py,
    kv_cache.py, tensors.py, tokens.py   sessions of models of transformers            (torch)
    contexts_command.py, context_folder.py   vllm-relay contexts
"""

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
