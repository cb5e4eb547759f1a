# SPDX-License-Identifier: Apache-2.0
"""Pure modules stay pure: importing them loads neither torch nor vLLM."""

from __future__ import annotations

import subprocess
import sys

import pytest

LOADED = "import sys; print([name for name in ('torch', 'vllm') if name in sys.modules])"


@pytest.mark.parametrize(
    "module",
    [
        "vllm_relay",
        "vllm_relay.cli",
        "vllm_relay.doctor",
        "vllm_relay.plugin",
        "vllm_relay.attention_backends.forest",
        "vllm_relay.attention_backends.plan",
        "vllm_relay.attention_backends.cost",
        "vllm_relay.attention_backends.gpu_config",
        "vllm_relay.attention_backends.gpu_plan",
        "vllm_relay.prefix_cache.belady",
        "vllm_relay.prefix_cache.next_use",
        "vllm_relay.prefix_cache.policies",
        "vllm_relay.scheduler.fairness",
        "vllm_relay.scheduler.order",
        "vllm_relay.sparse.contexts_command",
    ],
)
def test_import_loads_neither_torch_nor_vllm(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {module}; {LOADED}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
