# SPDX-License-Identifier: Apache-2.0
"""vLLM without its model: what a cache, a scheduler and a rate of arrivals do to requests.

input.py             reads the requests: prompts, chats, token ids, traces
engine.py            the engine core that is asked for, with a stub for its model  (vLLM)
executor.py          that stub                                                     (vLLM)
virtual_time.py      runs it by a clock that each step moves by its costs          (vLLM)
predictor.py         hits and waits of a list of requests                          (vLLM)
report.py            tables, JSON, a plot
run.py               `vllm-relay predict`
"""
