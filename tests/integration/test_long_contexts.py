# SPDX-License-Identifier: Apache-2.0
"""RELAY_SPARSE in a real vLLM, against RELAY, on tiny models in float32 with small windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import Run, assert_same_completions, start

pytestmark = pytest.mark.integration

SMALL_WINDOW = {"min_context_tokens": 96, "sink_tokens": 20, "window_tokens": 40}
EVERYTHING = {"relay": {**SMALL_WINDOW, "alpha": 0}}
MOST = {"relay": {**SMALL_WINDOW, "alpha": 1e-7}}
SCENARIOS = ("shared", "parallel_sampling", "prompt_logprobs", "abort", "salts")
# no prompt is so long that fewer blocks than this could not hold it as a whole
FEW_BLOCKS = {"num_gpu_blocks_override": 24}


@pytest.mark.parametrize("model", ["llama", "windows"])
@pytest.mark.parametrize("options", [EVERYTHING, MOST], ids=["everything", "most"])
def test_tokens_are_those_of_dense_attention(run: Run, model: str, options: dict[str, Any]) -> None:
    sparse = run("relay_sparse", model=model, scenarios=SCENARIOS, additional_config=options)
    dense = run("relay", model=model, scenarios=SCENARIOS)
    for scenario in ("shared", "abort", "salts"):
        assert_same_completions(sparse[scenario], dense[scenario])
    for ours, theirs in zip(sparse["prompt_logprobs"], dense["prompt_logprobs"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)
    # these have come back from the device: nothing of the comparison was dense on both sides
    assert sparse["metrics"]["relay:host_seconds"] > 0


def test_short_requests_are_computed_as_without_the_option(run: Run) -> None:
    sparse = run("relay_sparse", scenarios=SCENARIOS)
    dense = run("relay", scenarios=SCENARIOS)
    assert [c["token_ids"] for c in sparse["shared"]] == [c["token_ids"] for c in dense["shared"]]
    assert sparse["prompt_logprobs"] == dense["prompt_logprobs"]
    assert sparse["metrics"]["relay:host_seconds"] == 0


@pytest.mark.parametrize("prefill", ["exact_offload", "exact_resident"])
def test_reading_everything_gives_the_logits_of_dense_attention(run: Run, prefill: str) -> None:
    logits = {"scenarios": ("logits",), "logprobs_mode": "raw_logits", "max_logprobs": -1}
    options = {"relay": {**EVERYTHING["relay"], "prefill": prefill}}
    sparse = run("relay_sparse", additional_config=options, **logits)["logits"]
    dense = run("relay", **logits)["logits"]
    for ours, theirs in zip(sparse, dense, strict=True):
        for step, expected in zip(ours, theirs, strict=True):
            assert step == pytest.approx(expected, abs=1e-4)


def test_fewer_blocks_than_the_requests_have_tokens(run: Run) -> None:
    sparse = run(
        "relay_sparse", scenarios=("shared", "reset"), additional_config=EVERYTHING, **FEW_BLOCKS
    )
    assert_same_completions(sparse["shared"], run("relay", scenarios=SCENARIOS)["shared"])
    assert sparse["reset"], "a block was not given back"


def test_preempted_requests_go_on_where_they_were(run: Run) -> None:
    sparse = run("relay_sparse", scenarios=("preempted", "reset"), additional_config=EVERYTHING)
    dense = run("relay", scenarios=("preempted",))
    assert_same_completions(sparse["preempted"], dense["preempted"])
    assert sparse["metrics"]["relay:preempted_kept_tokens"] > 1000
    assert sparse["reset"], "a block was not given back"


def test_requests_wait_for_host_memory(run: Run) -> None:
    per_token = 2 * (2 * 2 * 32 * 4 + 2 * 32)  # layers x (keys and values, and codes)
    longest = 1024 * per_token  # max_model_len in whole granules
    options = {"relay": {**EVERYTHING["relay"], "host_memory_gib": 2 * longest / (1 << 30)}}
    sparse = run("relay_sparse", scenarios=("shared",), additional_config=options)
    assert_same_completions(sparse["shared"], run("relay", scenarios=SCENARIOS)["shared"])


@pytest.mark.parametrize("where", ["memory", "folder"])
def test_contexts_are_reused_to_the_token(run: Run, where: str, tmp_path: Path) -> None:
    options = MOST
    if where == "folder":
        options = {"relay": {**EVERYTHING["relay"], "context_dir": str(tmp_path / "contexts")}}
    found = run(
        "relay_sparse",
        scenarios=("contexts", "reset"),
        additional_config=options,
        num_gpu_blocks_override=60,
        multiprocessing=where == "folder",
    )["contexts"]
    assert found["before"]["cached_tokens"] == [0, 0, 0, 0, 0]
    assert found["deleted"]["cached_tokens"] == [0, 0, 0, 0, 0]
    for kept in (found["fresh"], found["kept"]):
        assert kept["cached_tokens"] == [203, 203, 203, 203, 150]
        assert_same_completions(kept["completions"], found["before"]["completions"])
    assert found["states"] == ["indexing", "stored" if where == "folder" else "memory"]
    assert found["left"] == 0
    if where == "folder":
        assert not list((tmp_path / "contexts").iterdir())


@pytest.mark.parametrize("options", [EVERYTHING, MOST], ids=["everything", "most"])
def test_a_context_that_cannot_be_read_is_computed_again(
    run: Run, options: dict[str, Any], tmp_path: Path
) -> None:
    options = {"relay": {**options["relay"], "context_dir": str(tmp_path / "contexts")}}
    damaged, gone = run("relay_sparse", scenarios=("damaged_context",), additional_config=options)[
        "damaged_context"
    ]
    for first, again in (damaged, gone):
        assert_same_completions(first, again)


def test_spawned_processes(run: Run) -> None:
    sparse = run("relay_sparse", multiprocessing=True, additional_config=EVERYTHING)
    assert_same_completions(sparse["shared"], run("relay", scenarios=SCENARIOS)["shared"])
    assert sparse["metrics"]["relay:host_kv_limit_bytes"] > 0


@pytest.mark.parametrize(
    ("model", "engine_args", "message"),
    [
        ("gemma2", {}, "relay cannot serve long contexts of layers with scores with a soft cap"),
        (
            "llama",
            {"additional_config": {"relay": {"host_memory_gib": 1e-6}}},
            "additional_config.relay.host_memory_gib: one request of max_model_len=512 tokens",
        ),
        (
            "llama",
            {"attention_backend": "relay", "additional_config": {"relay": {"alpha": 0.1}}},
            "additional_config.relay.alpha is given but only RELAY_SPARSE reads it",
        ),
        (
            "llama",
            {"additional_config": {"relay": {"contexts": ["@/nowhere"]}}},
            "additional_config.relay.contexts[0]: '@/nowhere' was given",
        ),
    ],
    ids=["soft_cap", "host_memory", "other_backend", "contexts"],
)
def test_start_up_is_refused(
    models: dict[str, Path],
    tmp_path: Path,
    model: str,
    engine_args: dict[str, Any],
    message: str,
) -> None:
    engine_args = {"attention_backend": "relay_sparse", "model": str(models[model]), **engine_args}
    result = start(tmp_path, engine_args)
    assert result.returncode != 0
    assert message in result.stderr
