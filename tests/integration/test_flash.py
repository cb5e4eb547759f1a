# SPDX-License-Identifier: Apache-2.0
"""RELAY beside FlashAttention and FlashInfer, for which twins stand, in a real vLLM, against
CPU_ATTN."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.runs import Run, assert_same_completions, run_v2
from tests.integration.tiny_models import save_drafter

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("driver", "model"),
    [
        ("flash_main", "llama"),
        ("flashinfer_main", "llama"),
        pytest.param("flash_main", "gemma2", marks=pytest.mark.soak),
    ],
)
def test_greedy_tokens_are_those_of_cpu_attn(run: Run, driver: str, model: str) -> None:
    relay = run("relay", model=model, driver=driver)
    stock = run("cpu_attn", model=model)
    assert_same_completions(relay["shared"], stock["shared"])
    metrics = relay["metrics"]
    assert 0 < metrics["relay:request_steps_shared"] < metrics["relay:request_steps"]
    assert 0 < metrics["relay:kv_tokens_read"] < metrics["relay:kv_tokens_logical"]
    assert metrics["relay:forest_depth"] >= 1


@pytest.mark.soak
@pytest.mark.parametrize("driver", ["flash_main", "flashinfer_main"])
def test_model_runner_v2(run: Run, models: dict[str, Path], tmp_path: Path, driver: str) -> None:
    args = {"attention_backend": "relay", "model": str(models["llama"])}
    relay = run_v2(driver, args, ("few_tokens",), tmp_path)
    stock = run("cpu_attn", scenarios=("few_tokens",))
    assert_same_completions(relay["few_tokens"], stock["few_tokens"])
    assert (
        0 < relay["metrics"]["relay:kv_tokens_read"] < relay["metrics"]["relay:kv_tokens_logical"]
    )


@pytest.mark.soak
@pytest.mark.parametrize("driver", ["flash_main", "flashinfer_main"])
def test_drafts_are_verified_together(
    run: Run, models: dict[str, Path], tmp_path: Path, driver: str
) -> None:
    drafter = str(save_drafter(models["llama"], tmp_path / "drafter"))
    drafts = {"method": "eagle", "num_speculative_tokens": 2, "model": drafter}
    relay = run("relay", scenarios=("shared",), speculative_config=drafts, driver=driver)
    assert_same_completions(relay["shared"], run("cpu_attn")["shared"])
    metrics = relay["metrics"]
    assert metrics["vllm:spec_decode_num_draft_tokens"] > 0
    assert 0 < metrics["relay:kv_tokens_read"] < metrics["relay:kv_tokens_logical"]
