# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of long contexts.

scheduler.py         hooks into vLLM's KV cache manager                            (vLLM)
kv_cache_spec.py     frees the blocks between sinks and window                     (vLLM)
context_record.py    what is known of a context                                    (pure)
catalog.py           which contexts there are, and which a prompt begins with
host_memory.py       who may use how much host memory                              (pure)
kept_contexts.py     which requests become contexts, and which contexts leave      (vLLM)
client_quota.py      which contexts leave for those that requests ask for          (pure)
reusable_requests.py which requests may reuse contexts, and become one             (vLLM)
memory.py            how much memory is left for this process
"""
