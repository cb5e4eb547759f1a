# SPDX-License-Identifier: Apache-2.0
"""RELAY on NVIDIA GPUs (docs/cuda.md): vLLM's hooks, plans made on the device, Triton kernels.

config.py, tune.py   sizes of the kernels: what ships, what was measured
plan.py              the work list, and how a forest becomes one: the oracle       (numpy)
planner.py, hidden_bits.py, totals.py   the same on the device, in five launches   (torch)
launch.py, ops.py    a layer: two launches; the public functions                   (torch)
prompts.py           which requests the stock backend serves                       (torch)
kernels/             attention, planning, merging, writing of the KV cache         (Triton)
relay.py, relay_stock.py, relay_prompts.py   the backend with these kernels, beside the
                     stock backend that serves prompts                             (vLLM)
flash/               vLLM's FlashAttention over the nodes of a forest, and its backend
relay_choice.py      which of them serves a layer                                  (vLLM)
"""
