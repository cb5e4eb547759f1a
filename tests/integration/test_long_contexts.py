# SPDX-License-Identifier: Apache-2.0
"""RELAY_SPARSE in a real vLLM, against RELAY, on tiny models in float32 with small windows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import Run, assert_same_completions, needs_two_cores, start

pytestmark = pytest.mark.integration

SMALL_WINDOW = {"min_context_tokens": 96, "sink_tokens": 20, "window_tokens": 40}
EVERYTHING = {"relay": {**SMALL_WINDOW, "alpha": 0}}
MOST = {"relay": {**SMALL_WINDOW, "alpha": 1e-7}}
CONTEXT_FILE_BYTES = 400_000
"""About what the files of one of the contexts below have."""
PLAIN = ("shared", "parallel_sampling", "prompt_logprobs", "abort", "salts")
# "reset" last: it says whether every block has come back
SCENARIOS = (*PLAIN, "preempted", "contexts", "reset")


def sparse_run(run: Run, options: dict[str, Any]) -> dict[str, Any]:
    return run("relay_sparse", scenarios=SCENARIOS, additional_config=options)


def dense_run(run: Run) -> dict[str, Any]:
    return run("relay", scenarios=(*PLAIN, "preempted"))


both_options = pytest.mark.parametrize("options", [EVERYTHING, MOST], ids=["everything", "most"])


@both_options
def test_tokens_are_those_of_dense_attention(run: Run, options: dict[str, Any]) -> None:
    sparse, dense = sparse_run(run, options), dense_run(run)
    for scenario in ("shared", "abort", "salts"):
        assert_same_completions(sparse[scenario], dense[scenario])
    for ours, theirs in zip(sparse["prompt_logprobs"], dense["prompt_logprobs"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)
    # something was read on the host: the comparison is not of dense attention on both sides
    assert sparse["metrics"]["relay:host_seconds"] > 0
    assert sparse["reset"], "a block was not given back"


def test_layers_with_a_sliding_window_stay_as_they_are(run: Run) -> None:
    scenarios = ("shared", "abort")
    sparse = run("relay_sparse", model="windows", scenarios=scenarios, additional_config=EVERYTHING)
    dense = run("relay", model="windows", scenarios=scenarios)
    for scenario in scenarios:
        assert_same_completions(sparse[scenario], dense[scenario])
    assert sparse["metrics"]["relay:host_seconds"] > 0


def test_short_requests_are_computed_as_without_the_option(run: Run) -> None:
    sparse, dense = run("relay_sparse", scenarios=PLAIN), dense_run(run)
    assert [c["token_ids"] for c in sparse["shared"]] == [c["token_ids"] for c in dense["shared"]]
    assert sparse["parallel_sampling"] == dense["parallel_sampling"]
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


def test_fewer_blocks_and_less_host_memory_than_the_requests_have_tokens(run: Run) -> None:
    per_token = 2 * (2 * 2 * 32 * 4 + 2 * 32)  # layers x (keys and values, and codes)
    longest = 1024 * per_token  # max_model_len in whole granules
    options = {"relay": {**EVERYTHING["relay"], "host_memory_gib": 2 * longest / (1 << 30)}}
    sparse = run(
        "relay_sparse",
        scenarios=("shared", "reset"),
        additional_config=options,
        num_gpu_blocks_override=24,
    )
    assert_same_completions(sparse["shared"], dense_run(run)["shared"])
    assert sparse["reset"], "a block was not given back"


@both_options
def test_preempted_requests_go_on_where_they_were(run: Run, options: dict[str, Any]) -> None:
    sparse = sparse_run(run, options)
    assert_same_completions(sparse["preempted"], dense_run(run)["preempted"])
    assert sparse["metrics"]["relay:preempted_kept_tokens"] > 1000


def check_contexts(found: dict[str, Any], state: str) -> None:
    for without in (found["before"], found["deleted"]):
        # of each other's blocks on the device
        assert all(tokens % 32 == 0 for tokens in without["cached_tokens"])
        assert without["cached_tokens"][0] == 0
    assert found["kept"]["cached_tokens"] == [203, 203, 203, 203, 150]
    for completions in (found["fresh"], found["kept"]["completions"]):
        assert_same_completions(completions, found["before"]["completions"])
    first, then = found["states"]  # a machine may be done with it before it is asked
    assert first in ("indexing", state) and then == state
    assert found["left"] == 0


@both_options
def test_contexts_are_reused_to_the_token(run: Run, options: dict[str, Any]) -> None:
    check_contexts(sparse_run(run, options)["contexts"], "memory")


@pytest.mark.parametrize(
    "spawns", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["forked", "spawned"]
)
def test_contexts_in_a_folder_and_other_processes(run: Run, tmp_path: Path, spawns: bool) -> None:
    options = {"relay": {**EVERYTHING["relay"], "context_dir": str(tmp_path / "contexts")}}
    sparse = run(
        "relay_sparse",
        scenarios=("shared", "contexts"),
        multiprocessing=True,
        spawns=spawns,
        additional_config=options,
    )
    assert_same_completions(sparse["shared"], dense_run(run)["shared"])
    check_contexts(sparse["contexts"], "stored")
    assert sparse["metrics"]["relay:host_kv_limit_bytes"] > 0
    assert not list((tmp_path / "contexts").iterdir())


@both_options
@pytest.mark.parametrize("place", ["memory", "folder"])
def test_turns_of_a_chat_share_what_they_have_in_common(
    run: Run, tmp_path: Path, place: str, options: dict[str, Any]
) -> None:
    relay = dict(options["relay"])
    if place == "folder":
        relay["context_dir"] = str(tmp_path / "contexts")
    found = run("relay_sparse", scenarios=("chat",), additional_config={"relay": relay})["chat"]
    assert_same_completions(found["kept"], found["before"])
    assert_same_completions(found["again"], [found["before"][2]] * 2)
    # the last token of an answer is not computed
    assert found["num_tokens"] == [275, 311, 347]
    assert found["cached_tokens"] == [0, 275, 311]
    # links that are short are stored with what follows
    assert found["parents"] == [None, 0, 0]


def test_a_context_that_cannot_be_read_is_computed_again(run: Run, tmp_path: Path) -> None:
    options = {"relay": {**MOST["relay"], "context_dir": str(tmp_path / "contexts")}}
    found = run("relay_sparse", scenarios=("damaged_context",), additional_config=options)
    check_damaged(found)


def check_damaged(found: dict[str, Any]) -> None:
    assert len(found["damaged_context"]) == 2
    for before, first, again in found["damaged_context"]:
        assert_same_completions(first, before)
        assert_same_completions(again, before)


@needs_two_cores
def test_a_context_that_one_rank_cannot_read_is_computed_again(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, *_ = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{first}|{second}")
    options = {"relay": {**EVERYTHING["relay"], "context_dir": str(tmp_path / "contexts")}}
    found = run(
        "relay_sparse",
        scenarios=("damaged_context",),
        tensor_parallel_size=2,
        additional_config=options,
    )
    check_damaged(found)


@pytest.mark.soak
def test_contexts_leave_a_full_folder_also_while_they_are_read(run: Run, tmp_path: Path) -> None:
    options = {
        **EVERYTHING["relay"],
        "context_dir": str(tmp_path / "contexts"),
        "context_disk_gib": 2.5 * CONTEXT_FILE_BYTES / (1 << 30),
    }
    found = run(
        "relay_sparse", scenarios=("evicted_contexts",), additional_config={"relay": options}
    )["evicted_contexts"]
    # the second leaves for the third, and the first while it is read
    assert found["seen"] == [[0, 2], [0, 2], [1, 2]]
    assert [each["cached_tokens"] for each in found["asked"]] == [203, 0, 203, 203]
    first, second, third = found["before"]
    answers = [found["reader"], *found["asked"]]
    assert_same_completions(answers, [first, first, first, second, third])


@pytest.mark.parametrize(
    ("model", "engine_args", "message"),
    [
        ("gemma2", {}, "relay cannot serve long contexts of layers with scores with a soft cap"),
        (
            "llama",
            {"additional_config": {"relay": {"host_memory_gib": 1e-6}}},
            "additional_config.relay.host_memory_gib: one request of max_model_len=512 tokens",
        ),
    ],
    ids=["soft_cap", "host_memory"],
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
