# SPDX-License-Identifier: Apache-2.0
"""Plans of steps for the Triton kernels, made on the host.

plan.py, plan_cuts.py   the work list of a step: cut by cost, dealt to programs    (numpy)
decode_plans.py         the plans of the last steps, of which most steps take one
planner.py              plans where captured graphs read them                      (torch)
"""
