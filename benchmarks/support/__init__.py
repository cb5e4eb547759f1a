# SPDX-License-Identifier: Apache-2.0
"""What benchmarks share.

common.py              options, timing, goals, results
machine.py             the machine, and what it can do at best: peak.cpp
markdown.py            tables
figures.py             plots
model.py               a model of which only the geometry is given
decoding.py            requests to an engine, and how long its steps take
step_engine.py         an engine whose decode steps are timed
step_engine_main.py    its process
"""
