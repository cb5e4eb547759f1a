# SPDX-License-Identifier: Apache-2.0
"""Attention that reads what requests share once a step: the plan, the kernels, vLLM's hooks.

    forest.py            block tables -> which requests share which KV blocks          (numpy)
    hidden_tokens.py, step_rows.py   tokens that a request does not see                (numpy)
    cost.py, plan.py     what reading a range costs; the work list of one step         (numpy)
    reference.py         the public functions in plain float64 torch: the oracle       (torch)
    ops.py               the public functions: write_kv_cache, relay_attention, merge_states
    cpu.py               tensors in, addresses and strides out                         (torch, _C)
    unpacked_plan.py, unpacked.py   the same over tokens that are in no KV cache       (torch)
    relay_base.py, relay.py   the RELAY backend on CPUs: vLLM's hooks, nothing else    (vLLM)
    step_stats.py        counters of a step and their merging
    cuda.py, gpu_config.py, gpu_hidden.py, gpu_ops.py, gpu_plan.py, gpu_planner.py, gpu_prompts.py,
    gpu_totals.py, gpu_tune.py   the same on NVIDIA GPUs (docs/cuda.md)                (torch)
    triton_attention.py, triton_counts.py, triton_groups.py, triton_hidden.py, triton_items.py,
    triton_kv_cache.py, triton_merge.py, triton_plan.py   its kernels                  (Triton)
    relay_cuda.py, relay_cuda_choice.py, relay_cuda_flash.py, relay_cuda_prompts.py,
    relay_cuda_triton.py   the RELAY backend on CUDA                                   (vLLM)
    sparse/              RELAY_SPARSE, above long_context/

A step: `RelayMetadataBuilder.build` gets block table, lengths and query positions, once per KV
cache group. `build_forest` sorts the rows of the block table and reads off every group of two or
more requests that start with the same blocks, at every depth: the longest-common-prefix intervals.
`plan_step` drops the groups whose sharing does not pay and lays out entries, spans, row blocks,
items and merges (docs/kernels.md, section 8). Every layer packs its new keys and values into their
slots and runs the plan: threads take items, fold spans into row states, merge, normalise. On CUDA
the device plans, in five small launches, and a layer is two launches for decodes and a stock
backend for prompts.
"""
