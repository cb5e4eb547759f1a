# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of long contexts.

scheduler.py         hooks into vLLM's KV cache manager                            (vLLM)
kv_cache_spec.py     frees the blocks between sinks and window                     (vLLM)
host_memory.py, catalog.py   who may use how much host memory; which contexts there are (pure)
context_bytes.py     what contexts take that share what they continue              (pure)
client_quota.py      which contexts leave for those that requests ask for          (pure)
reusable_requests.py which requests may reuse contexts, and become one             (vLLM)
memory.py            how much memory is left for this process
"""
