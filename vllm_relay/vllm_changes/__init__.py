# SPDX-License-Identifier: Apache-2.0
"""Every change vllm-relay makes to vLLM: one file for each seam, one function for each change, with
its reason and when it can go.

    wrap.py              how functions of vLLM are replaced
    platform.py          which backend a layer gets, and when a configuration is checked: platforms
                         fall back to their own for names that they do not know
    configuration.py     which configurations belong to an `LLM`, and how refused ones are told
    scheduler.py         what stands beside the scheduler, whose queue of free blocks it has, and
                         what it is told
    block_pool.py        what happens to the KV blocks of a scheduler
    engine_core.py       commands of the engine core, what it does before requests and at the end,
                         how it names blocks
    engine_start.py      how engine cores start, what is computed before the first request
    requests.py          front ends check requests, and leave padding out of what they count
    server.py            routes, prompts and usage of servers
    shutdown.py          what is open when a server is told to end
    statistics.py        from workers to the metrics of the front end
    worker/              processes of workers: steps, positions, the mathematics of torch
    contract/            what is needed of vLLM, and whether a vLLM has it

All functions are idempotent: those given by the first caller stay. What is replaced passes on
arguments that it does not know. Nothing here knows what is done with a change: the functions to
call are given by `vllm_relay.wiring`, or by who runs in the process. What a process does not need
is not changed in it.
"""
