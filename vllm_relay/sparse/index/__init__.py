# SPDX-License-Identifier: Apache-2.0
"""Indexes over the keys of one kv head, and attention over what they find (docs/key-index.md).

query_types.py       TopK, Dipr                                              (pure)
elements.py          keys and values as numpy arrays
key_index.py         KeyIndex, the contract
key_codes.py         keys in eight bits
compiled_index.py    what indexes whose searches are C++ have in common
flat.py, blocks.py, coarse.py, graph.py   the indexes
default_width.py     how much a search looks at, measured when an index is built
nearest.py           the nearest keys of training queries, for graphs
sparse_layer.py      all kv heads of a layer: searched and attended in one call, with means of
                     values for what is not read
"""
