# SPDX-License-Identifier: Apache-2.0
"""Stored contexts: the tokens of a prompt, and of every kv head its keys, values and index.

context_store.py, disk_context_store.py, disk_context.py   in memory, and in a folder
context_file.py, context_writer.py   one context in a file (docs/context-files.md)
context_fingerprint.py, model_fingerprint.py   whose it is
context_folder.py, contexts_command.py   vllm-relay contexts
retrieval.py         what the query heads of one token read of a context
train_queries.py     what indexes learn from
partial_attention.py, tensors.py, tokens.py   states, arrays and ids as torch has them
"""
