# SPDX-License-Identifier: Apache-2.0
"""Which requests run, in which order: RelayScheduler against vLLM's.

bench_scheduler.py     many prefixes, a cache for few of them
bench_online.py        requests that arrive one by one, in virtual time
bench_backlog.py       a queue that stays long, in virtual time
bench_traces.py        traces by their timestamps, in virtual time
bench_serve.py         servers that `vllm bench serve` asks
bench_scheduling.py    what a scheduling step costs
engine.py              an engine that serves a list of requests
engine_main.py         its process
"""
