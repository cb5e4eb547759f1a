# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from vllm_relay.demo.options import DemoOptions
from vllm_relay.demo.recall_model import build_recall_model
from vllm_relay.demo.requests import WorkloadSizes, general_requests
from vllm_relay.demo.run import run_demo


def recording_console() -> Console:
    return Console(width=200, record=True, force_terminal=False)


@pytest.mark.integration
@pytest.mark.usefixtures("quick_engines")
def test_relay_answers_like_stock_vllm_and_reads_less(tmp_path: Path) -> None:
    console = recording_console()
    status = run_demo(
        DemoOptions(keep=tmp_path, json_path=tmp_path / "numbers.json", console=console),
        num_system_prompts=2,
        system_prompt_tokens=600,
        questions_per_prompt=4,
        output_tokens=8,
    )
    assert status == 0, console.export_text()
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    relay = numbers["relay"]
    assert numbers["passed"]
    assert relay["requests"] == relay["answers_right"] == numbers["identical_outputs"] == 16
    assert relay["output_tokens"] == relay["recited_tokens_right"] == 128
    assert relay["kv_tokens_read"] < relay["kv_tokens_logical"] / 2
    assert relay["prefix_cache_hit_rate"] > 0.5
    assert "answers right" in console.export_text()


@pytest.mark.soak
@pytest.mark.integration
@pytest.mark.usefixtures("quick_engines", "smollm2")
def test_a_real_model_answers_in_english_as_with_stock_vllm(tmp_path: Path) -> None:
    console = recording_console()
    options = DemoOptions("float32", json_path=tmp_path / "numbers.json", console=console)
    status = run_demo(
        options,
        "smollm2",
        num_system_prompts=2,
        system_prompt_tokens=600,
        questions_per_prompt=8,
        output_tokens=24,
        rounds=1,
    )
    text = console.export_text()
    assert status == 0, text
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert numbers["model"] == "smollm2"
    assert numbers["identical_outputs"] == numbers["relay"]["requests"] == 16
    assert numbers["relay"]["kv_tokens_read"] < numbers["relay"]["kv_tokens_logical"] / 2
    assert "For example: " in text and "16 / 16" in text


def test_settings_out_of_range_are_explained(tmp_path: Path) -> None:
    for dtype, settings, message in [
        ("bfloat16", {"rounds": 0}, "rounds is 0"),
        ("bfloat16", {"questions_per_prompt": 0}, "questions_per_prompt is 0"),
        ("int8", {}, "dtype is 'int8'"),
        ("bfloat16", {"system_prompt_tokens": 100}, "expected at least 49"),
        ("bfloat16", {"model": str(tmp_path / "missing")}, "missing"),
    ]:
        console = recording_console()
        options = DemoOptions(dtype, keep=tmp_path / "demo", console=console)
        assert run_demo(options, **settings) == 1
        assert message in console.export_text()


def test_any_model_gets_prompts_that_fit(tmp_path: Path) -> None:
    folder = build_recall_model(tmp_path, max_position_embeddings=512)
    requests = general_requests(str(folder), WorkloadSizes(2, 4096, 3, 32), seed=0)
    assert len(requests) == 6
    assert all(len(r.prompt_token_ids) <= 480 for r in requests)
    assert all(r.expected_token_ids is None for r in requests)
    assert requests[0].prompt_token_ids[:400] == requests[2].prompt_token_ids[:400]


def test_model_with_too_short_a_context_is_refused(tmp_path: Path) -> None:
    folder = build_recall_model(tmp_path, max_position_embeddings=64)
    with pytest.raises(ValueError, match="takes 64 tokens"):
        general_requests(str(folder), WorkloadSizes(2, 4096, 3, 32), seed=0)
