# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from vllm_relay.demo.smollm2.library import library_workload

SIZES = {"num_system_prompts": 3, "system_prompt_words": 2000, "questions_per_prompt": 60}


def test_branches_have_the_handbook_and_questions_of_their_own() -> None:
    workload = library_workload(**SIZES)
    prompts = [conversations.system_prompt for conversations in workload]
    assert len(set(prompts)) == 3
    assert all(1000 < len(prompt.split()) < 1200 for prompt in prompts)
    for conversations in workload:
        assert len({question.text for question in conversations.questions}) == 60
        assert all(question.continuation is None for question in conversations.questions)
    assert workload == library_workload(**SIZES) != library_workload(**SIZES, seed=1)


def test_the_handbook_ends_where_it_is_told_to() -> None:
    [whole] = library_workload(**{**SIZES, "num_system_prompts": 1})
    [cut] = library_workload(**{**SIZES, "num_system_prompts": 1, "system_prompt_words": 100})
    assert len(cut.system_prompt.split()) == 100
    assert whole.system_prompt.startswith(cut.system_prompt)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_system_prompts": 0}, "num_system_prompts is 0"),
        ({"num_system_prompts": 13}, "num_system_prompts is 13, expected at most 12"),
        ({"questions_per_prompt": 401}, "questions_per_prompt is 401, expected at most 400"),
    ],
)
def test_impossible_sizes_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        library_workload(**{**SIZES, **changes})
