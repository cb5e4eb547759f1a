# SPDX-License-Identifier: Apache-2.0
"""One workload per file; `python -m benchmarks.run_all` runs them all."""

import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # before anything imports vLLM
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
