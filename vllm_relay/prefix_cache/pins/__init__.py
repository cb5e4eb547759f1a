# SPDX-License-Identifier: Apache-2.0
"""Prompts that never leave the prefix cache.

pin.py               a pin: what it holds, whose it is and until when; how much room pins have
table.py             the pins of a scheduler; lives in the engine core            (vLLM)
commands.py          what front ends ask of it
client.py            pinning from front ends
system_prompts.py    pins the configured prompts when an engine starts
"""
