# SPDX-License-Identifier: Apache-2.0
"""What benchmarks share.

options.py             what all benchmarks are asked
timing.py              contenders timed in turn
result.py              what was found, and the goals
formatting.py          tables as text and in Markdown
machine.py             the machine, and what it can do at best: peak.cpp
figures.py             plots
model.py               a model of which only the geometry is given
decoding.py            requests to an engine, and how long its steps take
step_engine.py         an engine whose decode steps are timed
step_engine_main.py    its process
sampling_engine_main.py    the process of one that samples a prompt many times
"""
