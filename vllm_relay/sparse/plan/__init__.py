# SPDX-License-Identifier: Apache-2.0
"""Which index a kv head gets, and what is asked of it (docs/sparse-planner.md).

options.py           the options of a context database
index_choice.py      builds an index, and plans what is asked of it: the fastest that is good enough
head_sample.py       what searches find for some of its queries, and what that tells
search_cost.py, cost_calibration.py   what searches take on this machine
head_plan.py         what a stored context keeps of a plan
"""
