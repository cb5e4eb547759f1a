# SPDX-License-Identifier: Apache-2.0
"""Which index a kv head gets, and what is asked of it (docs/sparse-planner.md).

options.py           the options of a context database
head_profile.py, answer_errors.py, error_bound.py   what a head's queries need of its keys
search_candidates.py, search_cost.py   what could be asked, and what that costs on this machine
planner.py           the fastest that is good enough                         (pure)
prefix_planner.py, head_plan.py   plans for prefixes of a context, and what is kept of them
index_choice.py      builds what was chosen
index_measure.py, cost_calibration.py   what searches find and take, measured
"""
