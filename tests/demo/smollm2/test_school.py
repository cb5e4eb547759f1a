# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os

import pytest

from tests.modules.chat_templates import character_tokenizer, text_of
from vllm_relay.demo.requests import tokenize
from vllm_relay.demo.smollm2.school import examples, school_workload

SIZES = {"num_system_prompts": 2, "system_prompt_words": 100, "questions_per_prompt": 32}


def test_no_question_is_among_the_examples() -> None:
    workload = school_workload(**SIZES)
    shown = [question for question, _ in examples()]
    assert len(set(shown)) == len(shown)
    for conversations in workload:
        asked = {question.text for question in conversations.questions}
        assert len(asked) == 32 and asked.isdisjoint(shown)
        assert conversations.examples == examples()
    assert workload[0].system_prompt != workload[1].system_prompt
    assert workload == school_workload(**SIZES) != school_workload(**SIZES, seed=1)


def test_examples_are_turns_between_the_system_prompt_and_the_question() -> None:
    [conversations] = school_workload(**{**SIZES, "num_system_prompts": 1})
    prompts = [
        text_of(request.prompt_token_ids)
        for request in tokenize(character_tokenizer("separate turns"), [conversations])
    ]
    shared = os.path.commonprefix(prompts)
    turns = [
        f"<|user|>\n{question}<|end|>\n<|assistant|>\n{answer}<|end|>\n"
        for question, answer in examples()
    ]
    assert shared.startswith(f"<s><|system|>\n{conversations.system_prompt}<|end|>\n{turns[0]}")
    assert "".join(turns) in shared
    assert prompts[0].endswith(
        f"<|user|>\n{conversations.questions[0].text}<|end|>\n<|assistant|>\n"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_system_prompts": 0}, "num_system_prompts is 0"),
        ({"questions_per_prompt": 33}, "questions_per_prompt is 33, expected at most 32"),
    ],
)
def test_impossible_sizes_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        school_workload(**{**SIZES, **changes})
