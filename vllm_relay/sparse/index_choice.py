# SPDX-License-Identifier: Apache-2.0
"""Which index a layer's keys get."""

from __future__ import annotations

from vllm_relay.sparse.coarse import CoarseIndex
from vllm_relay.sparse.flat import FlatIndex
from vllm_relay.sparse.graph import GraphIndex
from vllm_relay.sparse.index import KeyIndex
from vllm_relay.sparse.options import DBOptions

_CLASSES: dict[str, type[KeyIndex]] = {
    "flat": FlatIndex,
    "coarse": CoarseIndex,
    "graph": GraphIndex,
}


def index_for_layer(layer_idx: int, options: DBOptions) -> KeyIndex:
    """An unbuilt index. "auto" scans the first layer, which reads many keys, and searches a graph
    in the others.

    Source: AlayaDB (2504.10326), section 6.2, the rules of figure 8.
    """
    if options.index_factory is not None:
        return options.index_factory(layer_idx)
    kind = options.index
    if kind == "auto":
        kind = "flat" if layer_idx == 0 else "graph"
    return _CLASSES[kind]()
