# SPDX-License-Identifier: Apache-2.0
"""RELAY on NVIDIA GPUs with vLLM's FlashAttention or FlashInfer (docs/cuda.md).

nodes.py             the nodes of a forest as a batch for their kernels            (numpy)
node_plans.py        the nodes of the last step                                    (torch)
attention.py         the batches of a step on the device; a layer                  (torch)
branch.py            nodes and tails beside each other in CUDA graphs              (torch)
kernels.py           block tables of the batches, merging                          (Triton)
tune.py              which is faster on a GPU, this or the Triton kernels          (torch)
hooks.py             what builders and layers of either backend do besides         (vLLM)
relay.py             the backend beside FlashAttention                             (vLLM)
relay_flashinfer.py  the backend beside FlashInfer                                 (vLLM)
"""
