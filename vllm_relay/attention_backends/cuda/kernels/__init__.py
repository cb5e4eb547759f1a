# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of RELAY on NVIDIA GPUs.

attention.py, items.py, hidden.py   states of rows over shared and private spans
merge.py             states of a row become its result
kv_cache.py          new keys and values are stored
"""
