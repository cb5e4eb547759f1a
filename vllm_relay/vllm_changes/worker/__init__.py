# SPDX-License-Identifier: Apache-2.0
"""What is changed in the processes of workers:

steps.py         they look at a step before they execute it
positions.py     they move positions
torch_math.py    functions of torch that are not exact when threads share their first call
"""
