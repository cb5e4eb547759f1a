# SPDX-License-Identifier: Apache-2.0
"""RELAY on NVIDIA GPUs with vLLM's FlashAttention (docs/cuda.md).

nodes.py             the nodes of a forest as a batch for FlashAttention           (numpy)
node_plans.py        the nodes of the last step                                    (torch)
attention.py         the batches of a step on the device; a layer                  (torch)
branch.py            nodes and tails beside each other in CUDA graphs              (torch)
kernels.py           block tables of the batches, merging                          (Triton)
tune.py              which is faster on a GPU, this or the Triton kernels          (torch)
relay.py             the backend: vLLM's hooks                                     (vLLM)
"""
