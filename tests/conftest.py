# SPDX-License-Identifier: Apache-2.0
"""What every test runs under: the environment, hypothesis's profile, and which process."""

from __future__ import annotations

import importlib
import os

import hypothesis
import pytest

# read by vLLM when it is imported
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # tests run beside each other
os.environ["TRITON_INTERPRET"] = "1"  # read by triton when it is imported
importlib.import_module("tests.attention_backends.triton_interpreter")  # mends it

hypothesis.settings.register_profile("relay", deadline=None)
hypothesis.settings.load_profile("relay")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For pytest-xdist: engines, which use every core, run first and one after the other; of the
    other tests, those of a file stay together because they share fixtures."""
    for item in items:
        uses_engine = item.get_closest_marker("integration") is not None
        group = "engines" if uses_engine else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: item.get_closest_marker("integration") is None)
