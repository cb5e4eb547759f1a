# SPDX-License-Identifier: Apache-2.0
"""Long contexts in vLLM: a window on the device, the rest in host memory, searched by indexes
(docs/sparse.md).

    window.py            which tokens the device holds; scheduler and worker go by it  (pure)
    orders.py            what scheduler and workers tell each other, and counters
    scheduling/          who may use how much host memory, and hooks into vLLM's KV cache manager
    host/                what a worker keeps in host memory, and attention over it
    commands.py, client.py, start_checks.py   contexts from front ends
"""
