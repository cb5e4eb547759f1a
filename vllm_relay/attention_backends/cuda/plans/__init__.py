# SPDX-License-Identifier: Apache-2.0
"""Plans of steps for the Triton kernels, made on the host.

spans.py                what is read together, and how many states it leaves       (numpy)
plan_cuts.py, plan.py   that cut by cost and dealt to programs; the work list      (numpy)
decode_plans.py         the plans of the last steps, of which most steps take one
planner.py              plans where captured graphs read them                      (torch)
"""
