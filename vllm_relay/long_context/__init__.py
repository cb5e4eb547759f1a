# SPDX-License-Identifier: Apache-2.0
"""Long contexts in vLLM: a window on the device, the rest in host memory, searched by indexes
(docs/sparse.md).

    window.py            which tokens the device holds; scheduler and worker go by it  (pure)
    reusable_requests.py which requests may reuse contexts, and become one             (vLLM)
    host_memory.py, catalog.py   who may use how much host memory; which contexts there are (pure)
    orders.py, stats.py  what scheduler and workers tell each other
    memory.py            how much memory is left for this process
    kv_cache_spec.py     frees the blocks between sinks and window                     (vLLM)
    scheduler.py         hooks into vLLM's KV cache manager                            (vLLM)
    host_sequence.py     keys and values of a running request, and indexes over them   (torch)
    host_attention.py    attention over tokens in host memory                          (torch)
    sequence_context.py, worker_contexts.py, index_builders.py, model_identity.py
                         contexts of a worker, and the threads that build their indexes (torch)
    device_copies.py, pending_writes.py, mirroring.py
                         a GPU's keys and values on their way to the host              (torch)
    worker.py, ranks.py  the requests of a worker and the host's part of them          (vLLM)
    commands.py, client.py, preload.py, start_checks.py   contexts from front ends
"""
