# SPDX-License-Identifier: Apache-2.0
"""The backend for CUDA in a real vLLM, its kernels in Triton's interpreter, against CPU_ATTN."""

from __future__ import annotations

import pytest

from tests.integration.runs import Run, assert_same_completions

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("model", ["gemma2", pytest.param("llama", marks=pytest.mark.soak)])
def test_greedy_tokens_are_those_of_cpu_attn(run: Run, model: str) -> None:
    """gemma2 has everything that llama has; the interpreter takes half a minute for either."""
    scenarios = ("few_tokens",)
    relay = run("relay", model=model, scenarios=scenarios, driver="triton_main")
    stock = run("cpu_attn", model=model, scenarios=scenarios)
    assert_same_completions(relay["few_tokens"], stock["few_tokens"])
    metrics = relay["metrics"]
    assert 0 < metrics["relay:requests_shared"] < metrics["relay:requests"]
    assert 0 < metrics["relay:kv_tokens_read"] < metrics["relay:kv_tokens_logical"]
