# SPDX-License-Identifier: Apache-2.0
"""What every test runs under: the environment of vLLM and hypothesis's profile."""

from __future__ import annotations

import importlib
import os

import hypothesis

# read by vLLM when it is imported
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ["TRITON_INTERPRET"] = "1"  # read by triton when it is imported
importlib.import_module("tests.attention_backends.triton_interpreter")  # mends it

hypothesis.settings.register_profile("relay", deadline=None)
hypothesis.settings.load_profile("relay")
