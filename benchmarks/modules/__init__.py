# SPDX-License-Identifier: Apache-2.0
"""Prompt modules.

bench_modules.py    time to the first token, KV blocks, and decode steps
engine_main.py      the process of its engines
"""
