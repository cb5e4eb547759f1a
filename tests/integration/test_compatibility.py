# SPDX-License-Identifier: Apache-2.0
"""Features of vLLM with RELAY and RelayScheduler together, against vLLM's own, on tiny models:
those of docs/compatibility.md that no other test runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import Run, assert_same_completions, needs_two_cores
from tests.integration.tiny_models import save_drafter

pytestmark = pytest.mark.integration

SCENARIOS = ("shared", "abort", "reset")
SHARED_SCENARIOS = ("shared", "parallel_sampling", "prompt_logprobs", "abort", "salts", "reset")
"""Those of a run that test_scheduler.py needs, too."""
RELAY = {"additional_config": {"relay": {"scheduler": True}}}
WITH_PIN = {"scenarios": (*SCENARIOS[:-1], "pinned", "reset"), **RELAY}
SPARSE = {"min_context_tokens": 96, "sink_tokens": 20, "window_tokens": 40, "alpha": 0}
BFLOAT16 = {"dtype": "bfloat16"}
BFLOAT16_COMPARISON = {"robust_lead": 0.04, "least_compared": 0.45}
"""Logits are rounded to steps of 1/32. How much that leaves to compare differs by CPU: with AVX2
it is 0.49."""


def stock_llama(run: Run) -> dict[str, Any]:
    return run("cpu_attn", scenarios=SHARED_SCENARIOS)


def assert_pinned(relay: dict[str, Any]) -> None:
    pinned = relay["pinned"]
    assert pinned["resident"]
    assert pinned["cached_tokens"] == [0, pinned["tokens"]]
    first, second = pinned["completions"]
    assert first["token_ids"] == second["token_ids"]


def assert_shared(relay: dict[str, Any]) -> None:
    metrics = relay["metrics"]
    assert 0 < metrics["relay:kv_tokens_read"] < metrics["relay:kv_tokens_logical"]


def test_linear_attention_beside_full_attention(run: Run) -> None:
    args = {"model": "qwen3_next", "scenarios": SCENARIOS, **BFLOAT16}
    relay, stock = run("relay", **{**args, **WITH_PIN}), run("cpu_attn", **args)
    for scenario in ("shared", "abort"):
        assert_same_completions(relay[scenario], stock[scenario], **BFLOAT16_COMPARISON)
    assert relay["reset"] is True
    assert_shared(relay)
    assert_pinned(relay)


def test_chunked_local_attention(run: Run) -> None:
    args = {"model": "llama4", "scenarios": SCENARIOS}
    relay, stock = run("relay", **{**args, **WITH_PIN}), run("cpu_attn", **args)
    for scenario in ("shared", "abort"):
        assert_same_completions(relay[scenario], stock[scenario])
    assert relay["reset"] is True
    assert_shared(relay)
    assert_pinned(relay)


def test_several_kv_cache_groups_by_both(run: Run) -> None:
    scenarios = ("shared", "parallel_sampling", "prompt_logprobs", "abort")  # as in test_vllm.py
    relay = run("relay", model="gemma2", scenarios=scenarios, **RELAY)
    stock = run("cpu_attn", model="gemma2", scenarios=scenarios)
    assert_same_completions(relay["shared"], stock["shared"])
    assert_shared(relay)


@pytest.mark.parametrize("backend", ["relay", "relay_sparse"])
def test_priorities_and_salts(run: Run, backend: str) -> None:
    options = {"scheduler": True, **(SPARSE if backend == "relay_sparse" else {})}
    relay = run(
        backend,
        scenarios=("priorities", "salts", "reset"),
        scheduling_policy="priority",
        additional_config={"relay": options},
    )
    # as in test_scheduler.py
    by_priority = run("cpu_attn", scenarios=("priorities", "reset"), scheduling_policy="priority")
    assert_same_completions(relay["priorities"], by_priority["priorities"])
    assert_same_completions(relay["salts"], stock_llama(run)["salts"])
    assert relay["reset"] is True


def test_without_prefix_caching(run: Run) -> None:
    relay = run("relay", scenarios=("shared", "abort"), enable_prefix_caching=False, **RELAY)
    stock = stock_llama(run)
    for scenario in ("shared", "abort"):
        assert_same_completions(relay[scenario], stock[scenario])
    assert relay["metrics"]["relay:kv_tokens_read"] == relay["metrics"]["relay:kv_tokens_logical"]


@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle"])
def test_drafts(run: Run, models: dict[str, Path], tmp_path: Path, method: str) -> None:
    drafts: dict[str, Any] = {"method": method, "num_speculative_tokens": 2}
    if method == "ngram":
        drafts |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    elif method == "draft_model":
        drafts["model"] = str(models["llama"])
    else:
        drafts["model"] = str(save_drafter(models["llama"], tmp_path / "drafter"))
    relay = run("relay", scenarios=SCENARIOS, speculative_config=drafts, **RELAY)
    stock = stock_llama(run)
    for scenario in ("shared", "abort"):
        assert_same_completions(relay[scenario], stock[scenario])
    assert relay["metrics"]["vllm:spec_decode_num_draft_tokens"] > 0
    assert relay["reset"] is True
    assert_shared(relay)


def test_a_connector_that_stores_on_disk(run: Run, tmp_path: Path) -> None:
    """On CPUs RELAY refuses connectors."""
    connector = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    relay = run(
        "cpu_attn",
        scenarios=("reloaded", "reset"),
        max_num_batched_tokens=4096,  # it stores a prompt whole, with the first chunk
        kv_transfer_config=connector,
        **RELAY,
    )
    assert_same_completions(relay["reloaded"], stock_llama(run)["shared"])
    assert relay["metrics"]["vllm:external_prefix_cache_hits"] > 500
    assert relay["reset"] is True


@pytest.mark.parametrize("model", ["qwen3_next", "llama4"])
def test_long_contexts_beside_other_kinds_of_layers(run: Run, model: str) -> None:
    args = {"model": model, "scenarios": SCENARIOS}
    args |= BFLOAT16 if model == "qwen3_next" else {}
    sparse = run("relay_sparse", additional_config={"relay": SPARSE}, **args)
    stock = run("cpu_attn", **args)
    comparison = BFLOAT16_COMPARISON if model == "qwen3_next" else {}
    for scenario in ("shared", "abort"):
        assert_same_completions(sparse[scenario], stock[scenario], **comparison)
    assert sparse["metrics"]["relay:host_seconds"] > 0
    assert sparse["reset"] is True


@pytest.mark.soak
@needs_two_cores
def test_tensor_parallel(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, *_ = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{first}|{second}")
    relay = run("relay", multiprocessing=True, tensor_parallel_size=2, **RELAY)
    assert_same_completions(relay["shared"], stock_llama(run)["shared"])
    assert_shared(relay)
