# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of long contexts.

scheduler.py         hooks into vLLM's KV cache manager                            (vLLM)
kv_cache_spec.py     frees the blocks between sinks and window                     (vLLM)
catalog.py           which contexts there are, and which a prompt begins with      (pure)
host_memory.py       who may use how much host memory                              (pure)
kept_contexts.py     which requests become contexts, and which contexts leave      (vLLM)
memory.py            how much memory is left for this process
"""
