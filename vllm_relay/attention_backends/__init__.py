# SPDX-License-Identifier: Apache-2.0
"""Attention that reads what requests share once a step: the plan, the kernels, vLLM's hooks.

    forest.py            block tables -> which requests share which KV blocks          (numpy)
    ragged.py            runs of different lengths in one array                        (numpy)
    hidden_tokens.py, step_rows.py   tokens that a request does not see                (numpy)
    cost.py, plan.py     what reading a range costs; the work list of one step on CPUs (numpy)
    reference.py         the public functions in plain float64 torch: the oracle       (torch)
    ops.py               the public functions: write_kv_cache, relay_attention, merge_states
    worker_blocks.py, block_order.py   the blocks of a worker's requests, from step to step, and
                         an order in which those that begin alike are neighbours       (numpy)
    groups.py            which groups pay, and what a step saves                       (numpy)
    step_stats.py        counters of a step and their merging
    relay_base.py        what the backend is on every device                           (vLLM)
    cpu/, cuda/          RELAY: hooks and kernels of a device
    sparse/              RELAY_SPARSE, above long_context/

A step: `RelayMetadataBuilder.build` gets block table, lengths and query positions, once per KV
cache group. `build_forest` sorts the rows of the block table and reads off every group of two or
more requests that start with the same blocks, at every depth: the longest-common-prefix intervals.
`plan_step` drops the groups whose sharing does not pay and lays out entries, spans, row blocks,
items, divisions and merges (docs/kernels.md, section 8). Every layer packs its new keys and values
into their slots and runs the plan: threads take items, fold spans into row states, merge,
normalise. On CUDA vLLM's FlashAttention is called once more, over the nodes of the forest; or a
work list like the CPU's is copied to the device, and a layer is two launches for decodes and a
stock backend for prompts.
"""
