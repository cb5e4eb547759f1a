# SPDX-License-Identifier: Apache-2.0
"""RELAY in a real vLLM, against vLLM's own CPU_ATTN, on tiny models in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import Run, assert_same_completions, start

pytestmark = pytest.mark.integration

SCENARIOS = ("shared", "parallel_sampling", "prompt_logprobs", "abort")


@pytest.mark.parametrize("model", ["llama", "gemma2"])
def test_greedy_tokens_are_those_of_cpu_attn(run: Run, model: str) -> None:
    relay = run("relay", model=model, scenarios=SCENARIOS)
    stock = run("cpu_attn", model=model, scenarios=SCENARIOS)
    assert_same_completions(relay["shared"], stock["shared"])
    assert_same_completions(relay["abort"], stock["abort"])


def test_parallel_sampling_is_that_of_cpu_attn(run: Run) -> None:
    relay, stock = (run(backend, scenarios=SCENARIOS) for backend in ("relay", "cpu_attn"))
    assert relay["parallel_sampling"] == stock["parallel_sampling"]


def test_prompt_logprobs_are_those_of_cpu_attn(run: Run) -> None:
    relay, stock = (run(backend, scenarios=SCENARIOS) for backend in ("relay", "cpu_attn"))
    for ours, theirs in zip(relay["prompt_logprobs"], stock["prompt_logprobs"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)


@pytest.mark.parametrize("model", ["llama", "gemma2"])
def test_metrics_count_what_was_shared(run: Run, model: str) -> None:
    metrics = run("relay", model=model, scenarios=SCENARIOS)["metrics"]
    assert 0 < metrics["relay:request_steps_shared"] < metrics["relay:request_steps"]
    assert 0 < metrics["relay:kv_tokens_read"] < metrics["relay:kv_tokens_logical"]
    assert 0 < metrics["relay:planning_seconds"] < 10
    assert metrics["relay:steps"] > 0
    assert metrics.keys() >= {"relay:forest_depth", "relay:groups", "vllm:prompt_tokens"}


def test_without_sharing_nothing_is_shared_and_tokens_stay(run: Run) -> None:
    alone = run("relay", additional_config={"relay": {"sharing": False}})
    assert alone["metrics"]["relay:request_steps_shared"] == 0
    assert alone["metrics"]["relay:kv_tokens_read"] == alone["metrics"]["relay:kv_tokens_logical"]
    shared = run("relay", scenarios=SCENARIOS)["shared"]
    assert [c["token_ids"] for c in alone["shared"]] == [c["token_ids"] for c in shared]


def test_preemption(run: Run) -> None:
    relay, stock = (run(backend, num_gpu_blocks_override=24) for backend in ("relay", "cpu_attn"))
    assert relay["metrics"]["vllm:num_preemptions"] > 0
    assert_same_completions(relay["shared"], stock["shared"])


def test_spawned_processes(run: Run) -> None:
    """EngineCore and worker are spawned: configurations are pickled, statistics travel back."""
    relay = run("relay", multiprocessing=True, spawns=True)
    expected = run("relay", scenarios=SCENARIOS)["shared"]
    assert [c["token_ids"] for c in relay["shared"]] == [c["token_ids"] for c in expected]
    metrics = relay["metrics"]
    assert 0 < metrics["relay:kv_tokens_read"] < metrics["relay:kv_tokens_logical"]


def test_fp8_kv_caches(run: Run) -> None:
    """Rounding them moves the logits of a tiny model with random weights by tenths: most first
    tokens stay what they were, where others would leave one in hundreds."""
    relay = run("relay", kv_cache_dtype="fp8")
    stock = run("cpu_attn", scenarios=SCENARIOS)
    pairs = list(zip(completions(relay), completions(stock), strict=True))
    same = sum(ours["token_ids"][0] == theirs["token_ids"][0] for ours, theirs in pairs)
    assert same >= len(pairs) / 3
    assert relay["metrics"]["relay:request_steps_shared"] > 0


def completions(result: dict[str, Any]) -> list[dict[str, Any]]:
    shared = result["shared"]
    return list(shared.values()) if isinstance(shared, dict) else shared


def test_torch_compile(run: Run) -> None:
    relay = run("relay", enforce_eager=False)
    stock = run("cpu_attn", scenarios=SCENARIOS)
    assert_same_completions(relay["shared"], stock["shared"])


@pytest.mark.parametrize(
    ("engine_args", "message"),
    [
        (
            {"kv_cache_dtype": "fp8_e5m2"},
            "relay cannot serve KV caches of another dtype than the model's or fp8 (e4m3): "
            "kv_cache_dtype=fp8_e5m2 was given; use kv_cache_dtype=auto, fp8, fp8_e4m3 or "
            "--attention-backend CPU_ATTN",
        ),
        (
            {"additional_config": {"relay": {"depht": 3}}},
            "additional_config.relay.depht: unknown option; known options: sharing",
        ),
    ],
    ids=["fp8_e5m2", "unknown_option"],
)
def test_start_up_is_refused_in_the_users_process(
    models: dict[str, Path], tmp_path: Path, engine_args: dict[str, Any], message: str
) -> None:
    engine_args = {**engine_args, "attention_backend": "relay", "model": str(models["llama"])}
    result = start(tmp_path, engine_args, multiprocessing=True)
    assert result.returncode != 0
    assert message in result.stderr
    assert "EngineCore" not in result.stderr
