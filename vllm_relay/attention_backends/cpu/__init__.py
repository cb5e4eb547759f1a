# SPDX-License-Identifier: Apache-2.0
"""RELAY on CPUs: vLLM's hooks, and the C++ kernels.

kernels.py           tensors in, addresses and strides out                         (torch, _C)
unpacked_plan.py, unpacked.py   the same over tokens that are in no KV cache       (torch)
relay.py             the backend: vLLM's hooks, nothing else                       (vLLM)
"""
