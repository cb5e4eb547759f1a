# SPDX-License-Identifier: Apache-2.0
"""The backends for CUDA in a real vLLM, their kernels in Triton's interpreter, against CPU_ATTN."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.runs import Run, assert_same_completions, run_v2

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("model", ["gemma2", pytest.param("llama", marks=pytest.mark.soak)])
def test_greedy_tokens_are_those_of_cpu_attn(run: Run, model: str) -> None:
    """gemma2 has everything that llama has; the interpreter takes half a minute for either."""
    scenarios = ("few_tokens",)
    relay = run("relay", model=model, scenarios=scenarios, driver="triton_main")
    stock = run("cpu_attn", model=model, scenarios=scenarios)
    assert_same_completions(relay["few_tokens"], stock["few_tokens"])
    metrics = relay["metrics"]
    assert 0 < metrics["relay:request_steps_shared"] < metrics["relay:request_steps"]
    assert 0 < metrics["relay:kv_tokens_read"] < metrics["relay:kv_tokens_logical"]


@pytest.mark.soak
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_long_contexts_are_those_of_cpu_attn(
    run: Run, models: dict[str, Path], tmp_path: Path, runner: str
) -> None:
    """Stored ones, too: prompts go on behind them."""
    window = {"min_context_tokens": 96, "sink_tokens": 20, "window_tokens": 40, "alpha": 1e-7}
    scenarios, options = ("few_tokens", "kept_document", "reset"), {"relay": window}
    if runner == "v1":
        sparse = run(
            "relay_sparse", scenarios=scenarios, driver="triton_main", additional_config=options
        )
    else:
        args = {"model": str(models["llama"]), "additional_config": options}
        sparse = run_v2(
            "triton_main", {"attention_backend": "relay_sparse", **args}, scenarios, tmp_path
        )
    stock = run("cpu_attn", scenarios=("few_tokens", "document"))
    assert_same_completions(sparse["few_tokens"], stock["few_tokens"])
    assert_same_completions(sparse["kept_document"]["completions"], stock["document"])
    assert sparse["kept_document"]["cached_tokens"] == [203, 203]
    metrics = sparse["metrics"]
    assert metrics["relay:host_seconds"] > 0 and metrics["relay:host_retrieved_tokens"] > 0
    assert sparse["reset"], "a block was not given back"
