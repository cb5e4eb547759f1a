# SPDX-License-Identifier: Apache-2.0
"""RELAY on CPUs: vLLM's hooks, and the C++ kernels.

work_items.py        who computes what of a step                                 (numpy, _C)
kernels.py           tensors in, addresses and strides out                         (torch, _C)
unpacked_plan.py, unpacked.py   the same over tokens that are in no KV cache       (torch)
relay.py             the backend: vLLM's hooks, nothing else                       (vLLM)
"""
