# SPDX-License-Identifier: Apache-2.0
"""vLLM in a process of its own, asked by jobs."""

from __future__ import annotations

import datetime
import json
import subprocess
from typing import Any

import pytest

from tests.integration.tiny_models import save_model
from tests.support import vllm_processes
from tests.tables.byte_tokenizer import byte_tokenizer
from vllm_relay.tables.semantic.scores import probability_of_true

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("engine")
    model = save_model("llama", folder / "model")
    byte_tokenizer().save_pretrained(model)
    done: subprocess.CompletedProcess[str] = vllm_processes.run_module(
        "tests.tables.engines.in_process_main", [str(model), str(folder)], {}
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "found.json").read_text())


def test_answers_are_those_that_vllm_gives_to_the_same_prompts(found: dict[str, Any]) -> None:
    assert len(found["answers"]) == 40
    # without white space around them
    assert found["answers"] == [text.strip() for text in found["expected"]]
    cut = "the answer was cut after 8 tokens: give more max_tokens"
    assert found["errors"] == [cut if is_cut else None for is_cut in found["is_cut"]]


def test_the_prefix_cache_finds_what_prompts_share(found: dict[str, Any]) -> None:
    report = found["report"]
    assert report["num_prompts"] == 40
    assert report["prompt_tokens"] == found["estimate"]["prompt_tokens"]
    assert 0 < report["cached_tokens"] < report["prompt_tokens"]
    assert report["output_tokens"] > 0


@pytest.mark.parametrize(
    ("output", "types"),
    [
        ("choices", str),
        ("alike", str),
        ("accented", str),
        ("int", int),
        ("float", float),
        ("bool", bool),
    ],
)
def test_structured_answers_are_values(
    found: dict[str, Any], output: str, types: type[object]
) -> None:
    values, errors = found["structured"][output]
    assert errors == [None] * 6
    assert all(type(value) is types for value in values)
    if output == "alike":
        assert set(values) <= {"no", "none", "north"}
    if output == "choices":
        assert set(values) <= {"yes", "no", "maybe"}


@pytest.mark.parametrize(
    ("output", "most"), [("choices", 1), ("alike", 3), ("accented", 1), ("bool", 1)]
)
def test_answers_with_choices_end_when_the_choice_is_certain(
    found: dict[str, Any], output: str, most: int
) -> None:
    decided = found["decided"][output]
    assert decided["values"] == decided["whole"]
    assert len(set(decided["values"])) > 1
    assert max(decided["num_tokens"]) == most


def test_the_likelier_of_true_and_false_is_the_answer(found: dict[str, Any]) -> None:
    assert len(found["scored"]) == 24
    scores = [probability_of_true(each["first_logprobs"]) for each in found["scored"]]
    answers = [each["text"] == "true" for each in found["scored"]]
    # of tokens that begin either, the likeliest one was taken
    for each, answer in zip(found["scored"], answers, strict=True):
        likeliest = max(each["first_logprobs"].items(), key=lambda one: one[1])[0]
        assert str(answer).lower().startswith(likeliest)
    assert all(score is not None and 0 < score < 1 for score in scores)
    assert len(set(scores)) > 4


def test_an_answer_that_may_go_on_as_several_choices_is_an_error(found: dict[str, Any]) -> None:
    completion = found["decided"]["too short"]
    assert completion["num_output_tokens"] == 2
    assert "'no' was cut at the question's max_tokens" in completion["error"]


def test_a_model_that_reasons_writes_its_whole_answer(found: dict[str, Any]) -> None:
    assert found["decided"]["limit with parser 'qwen3'"] == 64
    assert found["decided"]["limit with parser ''"] == 1


def test_structs_fit_their_types(found: dict[str, Any]) -> None:
    values, errors = found["structured"]["struct"]
    for value, error in zip(values, errors, strict=True):
        if value is None:
            # not every month has 31 days, and white space may have no end
            assert "is not a 'date'" in error or "not of type struct" in error
            continue
        row = json.loads(value)
        assert row["kind"] in ("a", "b") and type(row["parts"]["ok"]) is bool
        datetime.date.fromisoformat(row["day"])


def test_structured_json_follows_its_schema(found: dict[str, Any]) -> None:
    values, errors = found["structured"]["json"]
    for value, error in zip(values, errors, strict=True):
        assert error is None
        assert type(json.loads(value)["ok"]) is bool


def test_poisoned_rows_are_errors_and_the_others_have_answers(found: dict[str, Any]) -> None:
    errors = found["poisoned"]
    assert len(errors) == 200
    for index, (answer, error) in enumerate(errors):
        if index % 20 == 0:
            assert answer is None
            assert "fewer than 512" in error
        else:
            assert answer is not None
            assert error in (None, "the answer was cut after 2 tokens: give more max_tokens")


def test_prompts_that_vllm_refuses_are_completions_with_errors(found: dict[str, Any]) -> None:
    refused, answered = found["refused"]
    assert refused["error"]
    assert refused["num_prompt_tokens"] == refused["num_output_tokens"] == 0
    assert answered["error"] == ""


def test_closing_aborts_what_runs(found: dict[str, Any]) -> None:
    assert found["unfinished_before_closing"] > 0
    assert found["unfinished_after_closing"] == 0
    assert found["unfinished_after_interruption"] == 0
    assert found["num_known_after_interruption"] >= 3
    assert found["num_rows_after_interruption"] == 40


def test_the_speed_is_measured_and_leaves_no_cache(found: dict[str, Any]) -> None:
    assert found["prompts_per_s"] > 0
    assert found["cached_before_measuring"] > 0
    assert found["cached_after_measuring"] == 0


def test_the_identity_is_that_of_the_weights(found: dict[str, Any]) -> None:
    first, same, other = found["identities"]
    assert first == same != other
