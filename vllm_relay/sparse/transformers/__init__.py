# SPDX-License-Identifier: Apache-2.0
"""The context database of AlayaDB for models of transformers (docs/context-database.md).

db.py                DB: contexts, and sessions that reuse them
session.py, session_layer.py, session_states.py   the cache of a model
kv_cache.py          keys and values that others have computed
hf.py                attention for transformers
"""
