# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of RELAY on NVIDIA GPUs.

groups.py, plan.py, counts.py   a step is planned: who shares what, the work list
attention.py, items.py, hidden.py   states of rows over shared and private ranges
merge.py             states of a row become its result
kv_cache.py          new keys and values are stored
"""
