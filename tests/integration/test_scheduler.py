# SPDX-License-Identifier: Apache-2.0
"""RelayScheduler in a real vLLM, against vLLM's own, on tiny models in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import Run, assert_same_completions, start

pytestmark = pytest.mark.integration

SCENARIOS = ("shared", "parallel_sampling", "prompt_logprobs", "abort", "salts", "reset")
RELAY = {"additional_config": {"relay": {"scheduler": True}}}


@pytest.mark.parametrize(
    "engine_args",
    [
        {},
        {"long_prefill_token_threshold": 48},  # prefixes come chunk by chunk: siblings are held
        {"num_gpu_blocks_override": 24},  # too few for all
    ],
    ids=["plenty", "chunks", "preemption"],
)
def test_outputs_are_those_of_vllms_scheduler(run: Run, engine_args: dict[str, Any]) -> None:
    relay = run("cpu_attn", scenarios=SCENARIOS, **engine_args, **RELAY)
    stock = run("cpu_attn", scenarios=SCENARIOS, **engine_args)
    assert_same_completions(relay["shared"], stock["shared"])
    assert_same_completions(relay["salts"], stock["salts"])
    assert_same_completions(relay["abort"], stock["abort"])
    assert relay["prompt_logprobs"] == [
        pytest.approx(p, abs=1e-3) for p in stock["prompt_logprobs"]
    ]
    assert relay["reset"] is True
    if "num_gpu_blocks_override" in engine_args:
        assert relay["metrics"]["vllm:num_preemptions"] > 0


def test_priorities(run: Run) -> None:
    args = {"scenarios": ("priorities", "reset"), "scheduling_policy": "priority"}
    relay, stock = run("cpu_attn", **args, **RELAY), run("cpu_attn", **args)
    assert_same_completions(relay["priorities"], stock["priorities"])
    assert relay["reset"] is True


def test_class_by_name_in_processes_of_their_own_with_relay_attention(run: Run) -> None:
    scheduler = "vllm_relay.scheduler.RelayScheduler"
    relay = run("relay", multiprocessing=True, scheduler_cls=scheduler)
    stock = run("cpu_attn", scenarios=SCENARIOS)
    assert_same_completions(relay["shared"], stock["shared"])


def test_two_schedulers_are_refused(models: dict[str, Path], tmp_path: Path) -> None:
    engine_args = {
        "model": str(models["llama"]),
        "scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler",
        **RELAY,
    }
    result = start(tmp_path, engine_args, multiprocessing=True)
    assert result.returncode != 0
    assert "--scheduler-cls is vllm.v1.core.sched.scheduler.Scheduler: give one" in result.stderr
