# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from tests.support.refusals import ended
from vllm_relay.demo import run
from vllm_relay.demo.engine import RoundResult
from vllm_relay.demo.engine_process import EngineError
from vllm_relay.demo.options import DemoOptions
from vllm_relay.demo.recall_model import build_recall_model
from vllm_relay.demo.report import Comparison, compare
from vllm_relay.demo.requests import Request, WorkloadSizes, general_requests
from vllm_relay.demo.run import RECALL, Part, run_demo


def recording_console() -> Console:
    return Console(width=200, record=True, force_terminal=False)


@pytest.mark.integration
@pytest.mark.usefixtures("quick_engines")
def test_relay_answers_like_stock_vllm_and_reads_less(tmp_path: Path) -> None:
    console = recording_console()
    status = run_demo(
        DemoOptions(keep=tmp_path, json_path=tmp_path / "numbers.json", console=console),
        RECALL,
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
    assert "For example" in text and "16 / 16" in text


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[Part]:
    """The parts that were compared; engines answer right and alike."""
    parts: list[Part] = []

    def compare_part(options: DemoOptions, part: Part) -> Comparison:
        parts.append(part)
        right = [7, 8] if part.model == RECALL else None
        answers = [RoundResult([[7, 8]], 1.0, {})]
        return compare([Request([1], right)], answers, answers)

    monkeypatch.setattr(run, "_compare", compare_part)
    monkeypatch.setattr(run.smollm2, "smollm2_folder", lambda: Path("a-folder"))
    return parts


def test_after_the_proof_a_real_model_is_asked(tmp_path: Path, compared: list[Part]) -> None:
    console, path = recording_console(), tmp_path / "numbers.json"
    assert run_demo(DemoOptions("float32", json_path=path, console=console), rounds=3) == 0
    assert [(part.model, part.rounds) for part in compared] == [(RECALL, 3), ("smollm2", 1)]
    assert console.export_text().splitlines()[-1].startswith("Next: ")
    numbers = json.loads(path.read_text())
    assert (numbers["model"], numbers["in_english"]["model"]) == (RECALL, "smollm2")


@pytest.mark.parametrize("model", [RECALL, "smollm2", "a-model"])
def test_a_model_that_is_named_is_asked_alone(model: str, compared: list[Part]) -> None:
    assert run_demo(DemoOptions(console=recording_console()), model) == 0
    assert [part.model for part in compared] == [model]


def test_without_the_real_model_the_demo_says_so_and_ends_well(
    monkeypatch: pytest.MonkeyPatch, compared: list[Part]
) -> None:
    def missing() -> Path:
        raise ValueError("SmolLM2 cannot be had: no index\nIt comes from the package index")

    monkeypatch.setattr(run.smollm2, "smollm2_folder", missing)
    console = recording_console()
    assert run_demo(DemoOptions(console=console)) == 0
    assert [part.model for part in compared] == [RECALL]
    *_, why, last = console.export_text().splitlines()
    assert "No answers in English" in why and "vllm-relay demo --model smollm2" in why
    assert last.startswith("Next: ")


def test_an_engine_that_fails_leads_to_the_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(options: DemoOptions, part: Part) -> Comparison:
        raise EngineError("the stock engine failed: no memory")

    monkeypatch.setattr(run, "_compare", fail)
    console = recording_console()
    assert run_demo(DemoOptions(console=console)) == 1
    printed = console.export_text()
    assert "no memory" in printed and printed.splitlines()[-1].startswith("vllm-relay doctor")


def test_after_wrong_answers_no_other_model_is_asked(
    monkeypatch: pytest.MonkeyPatch, compared: list[Part]
) -> None:
    right, wrong = [RoundResult([[7, 8]], 1.0, {})], [RoundResult([[7, 9]], 1.0, {})]
    monkeypatch.setattr(
        run, "_compare", lambda options, part: compare([Request([1], [7, 8])], right, wrong)
    )
    console = recording_console()
    assert run_demo(DemoOptions(console=console)) == 1
    assert "relay answered 1 of 1 questions wrong" in console.export_text()


def test_settings_out_of_range_are_explained(tmp_path: Path) -> None:
    for dtype, settings, message in [
        ("bfloat16", {"rounds": 0}, "rounds is 0"),
        ("bfloat16", {"questions_per_prompt": 0}, "questions_per_prompt is 0"),
        ("int8", {}, "dtype is 'int8'"),
        ("bfloat16", {"system_prompt_tokens": 100}, "expected at least 49"),
        ("bfloat16", {"model": str(tmp_path / "missing")}, "missing"),
    ]:
        options = DemoOptions(dtype, keep=tmp_path / "demo", console=recording_console())
        status, refusal = ended(lambda given=options, more=settings: run_demo(given, **more))
        assert status == 2 and message in refusal


def test_any_model_gets_prompts_that_fit(tmp_path: Path) -> None:
    folder = build_recall_model(tmp_path, max_position_embeddings=512)
    requests = general_requests(str(folder), WorkloadSizes(2, 4096, 3, 32), seed=0)
    assert len(requests) == 6
    assert all(len(r.prompt_token_ids) <= 480 for r in requests)
    assert all(r.expected_token_ids is None for r in requests)
    assert requests[0].prompt_token_ids[:400] == requests[2].prompt_token_ids[:400]
    assert len({r.question for r in requests}) == 6


def test_model_with_too_short_a_context_is_refused(tmp_path: Path) -> None:
    folder = build_recall_model(tmp_path, max_position_embeddings=64)
    with pytest.raises(ValueError, match="takes 64 tokens"):
        general_requests(str(folder), WorkloadSizes(2, 4096, 3, 32), seed=0)
