# SPDX-License-Identifier: Apache-2.0
"""The worker's side of long contexts: what is in host memory, and attention over it.

worker.py            the requests of a worker and the host's part of them          (vLLM)
host_sequence.py     keys and values of a running request, and indexes over them   (torch)
host_attention.py    attention over tokens in host memory                          (torch)
sequence_context.py, worker_contexts.py, index_builders.py
                     contexts of a worker, and the threads that build their indexes (torch)
device_copies.py, mirroring.py
                     a GPU's keys and values on their way to the host              (torch)
"""
