# SPDX-License-Identifier: Apache-2.0
"""RELAY on NVIDIA GPUs (docs/cuda.md): vLLM's hooks, plans made on the host, Triton kernels.

step_batch.py        the requests of a step and what they share, for both ways     (numpy)
config.py, tune.py   sizes of the kernels: what ships, what was measured
copies.py            arrays of the host on the device                              (torch)
plans/               the work lists of steps, kept from step to step               (torch)
hidden_bits.py       hidden tokens where captured graphs read them                 (torch)
prompts.py           plans of prompts that no stock backend serves                 (torch)
launch.py, ops.py    a layer: two launches; the public functions                   (torch)
kernels/             attention, merging, writing of the KV cache                   (Triton)
relay.py, relay_stock.py   the backend with these kernels, beside the
                     stock backend that serves prompts                             (vLLM)
flash/               vLLM's FlashAttention or FlashInfer over the nodes of a forest, and backends
relay_choice.py      which of them serves a layer                                  (vLLM)
"""
