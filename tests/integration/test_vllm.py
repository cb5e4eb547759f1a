# SPDX-License-Identifier: Apache-2.0
"""RELAY in a real vLLM, against vLLM's own CPU_ATTN, on tiny models in float32."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.tiny_models import save_model

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
SCENARIOS = ("shared", "parallel_sampling", "prompt_logprobs", "abort")
ROBUST_LEAD = 1e-3  # nats; below it rounding may decide which token is best

Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    return {kind: save_model(kind, directory / kind) for kind in ("llama", "gemma2")}


@pytest.fixture(scope="module")
def run(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run scenarios on an engine; every different engine runs once."""
    done: dict[str, dict[str, Any]] = {}

    def run(
        backend: str,
        *,
        model: str = "llama",
        scenarios: tuple[str, ...] = ("shared",),
        multiprocessing: bool = False,
        **engine_args: Any,
    ) -> dict[str, Any]:
        engine_args |= {"attention_backend": backend, "model": str(models[model])}
        key = json.dumps([engine_args, scenarios, multiprocessing], sort_keys=True)
        if key not in done:
            directory = tmp_path_factory.mktemp("run")
            result = start(directory, engine_args, scenarios, multiprocessing)
            assert result.returncode == 0, result.stderr[-4000:]
            done[key] = json.loads((directory / "output.json").read_text())
        return done[key]

    return run


def start(
    directory: Path,
    engine_args: dict[str, Any],
    scenarios: tuple[str, ...] = (),
    multiprocessing: bool = False,
) -> subprocess.CompletedProcess[str]:
    args_path = directory / "engine_args.json"
    args_path.write_text(json.dumps(engine_args))
    driver = [sys.executable, "-m", "tests.integration.engine_main"]
    return subprocess.run(
        [*driver, str(directory / "output.json"), str(args_path), *scenarios],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(multiprocessing))},
        timeout=300,
    )


def assert_same_completions(actual: Any, expected: Any) -> None:
    """Equal tokens, up to the first position where the best two tokens are too close."""
    if isinstance(expected, dict) and "token_ids" not in expected:
        assert actual.keys() == expected.keys()
        actual, expected = list(actual.values()), list(expected.values())
    assert len(actual) == len(expected)
    compared = 0
    for ours, theirs in zip(actual, expected, strict=True):
        close = [position for position, lead in enumerate(theirs["leads"]) if lead < ROBUST_LEAD]
        end = close[0] if close else len(theirs["token_ids"])
        assert ours["token_ids"][:end] == theirs["token_ids"][:end]
        compared += end
    total = sum(len(theirs["token_ids"]) for theirs in expected)
    assert compared > 0.8 * total, f"only {compared} of {total} tokens were far enough apart"


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
    assert 0 < metrics["relay:requests_shared"] < metrics["relay:requests"]
    assert 0 < metrics["relay:kv_tokens_read"] < metrics["relay:kv_tokens_logical"]
    assert 0 < metrics["relay:planning_seconds"] < 10
    assert metrics["relay:steps"] > 0
    assert metrics.keys() >= {"relay:forest_depth", "relay:groups", "vllm:prompt_tokens"}


def test_without_sharing_nothing_is_shared_and_tokens_stay(run: Run) -> None:
    alone = run("relay", additional_config={"relay": {"sharing": False}})
    assert alone["metrics"]["relay:requests_shared"] == 0
    assert alone["metrics"]["relay:kv_tokens_read"] == alone["metrics"]["relay:kv_tokens_logical"]
    shared = run("relay", scenarios=SCENARIOS)["shared"]
    assert [c["token_ids"] for c in alone["shared"]] == [c["token_ids"] for c in shared]


def test_preemption(run: Run) -> None:
    relay, stock = (run(backend, num_gpu_blocks_override=24) for backend in ("relay", "cpu_attn"))
    assert relay["metrics"]["vllm:num_preemptions"] > 0
    assert_same_completions(relay["shared"], stock["shared"])


def test_spawned_processes(run: Run) -> None:
    """EngineCore and worker are spawned: configurations are pickled, statistics travel back."""
    relay = run("relay", multiprocessing=True)
    expected = run("relay", scenarios=SCENARIOS)["shared"]
    assert [c["token_ids"] for c in relay["shared"]] == [c["token_ids"] for c in expected]
    metrics = relay["metrics"]
    assert 0 < metrics["relay:kv_tokens_read"] < metrics["relay:kv_tokens_logical"]


def test_torch_compile(run: Run) -> None:
    relay = run("relay", enforce_eager=False)
    stock = run("cpu_attn", scenarios=SCENARIOS)
    assert_same_completions(relay["shared"], stock["shared"])


@pytest.mark.parametrize(
    ("engine_args", "message"),
    [
        (
            {"kv_cache_dtype": "fp8"},
            "relay cannot serve fp8 KV caches exactly yet: kv_cache_dtype=fp8 was given; "
            "use kv_cache_dtype=auto or --attention-backend CPU_ATTN",
        ),
        (
            {"additional_config": {"relay": {"depht": 3}}},
            "additional_config.relay.depht: unknown option; known options: sharing",
        ),
    ],
    ids=["fp8", "unknown_option"],
)
def test_start_up_is_refused_in_the_users_process(
    models: dict[str, Path], tmp_path: Path, engine_args: dict[str, Any], message: str
) -> None:
    engine_args = {**engine_args, "attention_backend": "relay", "model": str(models["llama"])}
    result = start(tmp_path, engine_args, multiprocessing=True)
    assert result.returncode != 0
    assert message in result.stderr
    assert "EngineCore" not in result.stderr
