# SPDX-License-Identifier: Apache-2.0
"""vLLM without its model: what a cache, a scheduler and a rate of arrivals do to requests.

input.py             reads the requests: prompts, chats, token ids, traces
load.py              when they arrive                                              (pure)
step_costs.py        what a step takes: given, or fitted to what was measured      (pure)
engine.py            the engine core that is asked for, and the size of its cache  (vLLM)
executor.py          that stub                                                     (vLLM)
requests.py          requests as an engine core takes them                         (vLLM)
virtual_time.py      serves requests by a clock that every step moves              (vLLM)
predictor.py         hits and waits of a list of requests                          (vLLM)
report.py            tables, JSON, a plot
run.py               `vllm-relay predict`
"""
