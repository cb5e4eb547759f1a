# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: `python -m benchmarks.run_all` runs them all; each is a program of its own, too.

attention/       shared prefixes: relay's operation against vLLM's
scheduler/       which requests run
prefix_cache/    which KV blocks stay
modules/         prompt modules
tables/          SQL that asks a model
cluster/         many replicas
sparse/          key indexes and sparse attention
long_context/    long requests
page/            the live page
cuda/            the Triton kernels on a GPU
support/         what they share
run_all.py       runs them
smoke_main.py    runs one to see that it runs
report.py        the pages of their results
questions.py, question_plots.py   what readers ask, and a plot of the answer
"""

import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # before anything imports vLLM
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
