# SPDX-License-Identifier: Apache-2.0
"""Which index a layer's keys get."""

from __future__ import annotations

from vllm_relay import sparse
from vllm_relay.sparse.index import KeyIndex
from vllm_relay.sparse.options import DBOptions

_CLASSES = {"flat": "FlatIndex", "coarse": "CoarseIndex", "graph": "GraphIndex"}


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
    return getattr(sparse, _CLASSES[kind])()


def load_index_classes() -> None:
    """So that indexes of every kind can be read from files."""
    for name in _CLASSES.values():
        getattr(sparse, name, None)
