# SPDX-License-Identifier: Apache-2.0
"""Stored contexts: the tokens of a prompt, and of every kv head its keys, values and index.

context_store.py     in memory
disk/                in a folder
context_fingerprint.py, model_fingerprint.py   whose it is
contexts_command.py  vllm-relay contexts
retrieval.py         what the query heads of one token read of a context
train_queries.py     what indexes learn from
partial_attention.py, tokens.py   states as torch has them, and ids as users have them
"""
