# SPDX-License-Identifier: Apache-2.0
"""What benchmarks share.

common.py              options, timing, goals, results
machine.py             the machine, and what it can do at best: peak.cpp
markdown.py            tables
step_engine.py         an engine whose decode steps are timed
step_engine_main.py    its process
"""
