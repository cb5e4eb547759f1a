# SPDX-License-Identifier: Apache-2.0
"""Short questions as children ask them at school, behind a system prompt and many worked examples:
a model of 135 million parameters answers most of them rightly."""

from __future__ import annotations

import numpy as np

from vllm_relay.demo.workload import Conversations, Question, check_at_least

SYSTEM_PROMPT = (
    "You help the children of a primary school. Answer each question in one short sentence, and "
    "repeat the words of the question."
)
_CAPITALS = """
    Austria Vienna, Norway Oslo, Ireland Dublin, Poland Warsaw, Hungary Budapest, Sweden Stockholm,
    Denmark Copenhagen, Finland Helsinki, Belgium Brussels, Cuba Havana, Peru Lima, Kenya Nairobi,
    Iran Tehran, Iraq Baghdad, Thailand Bangkok, Vietnam Hanoi
"""
_OPPOSITES = """
    big small, old young, wet dry, early late, rich poor, strong weak, full empty, loud quiet,
    hard soft, clean dirty, happy sad, thick thin, near far, open closed, left right, first last
"""
_MAKERS = """
    baker bread, tailor clothes, brewer beer, potter pots, jeweller rings, cobbler shoes,
    carpenter tables, painter pictures, writer books, spider webs, hen eggs, sheep wool
"""
_COLOURS = """
    snow white, coal black, blood red, leaf green, lemon yellow, tomato red, milk white,
    carrot orange, frog green, raven black, cherry red, rose red
"""
_ASKED = {
    "What is the capital of {}?": "France, Italy, Spain, Japan, Germany, England, Russia, Egypt, "
    "Greece, China, Portugal, Turkey",
    "What is the opposite of {}?": "hot, tall, good, fast, light, day, black, up, long, high",
    "Which colour has {}?": "grass, the sky, a banana, the sea, the sun, a strawberry",
    "What does a {} make?": "bee, cow, cook, composer",
}


def examples() -> list[tuple[str, str]]:
    """Questions and answers, of each kind in turn."""
    kinds = [
        [
            (question.format(*pair.split()), answer.format(*pair.split()))
            for pair in " ".join(pairs.split()).split(", ")
        ]
        for question, answer, pairs in (
            ("What is the capital of {}?", "The capital of {} is {}.", _CAPITALS),
            ("What is the opposite of {}?", "The opposite of {} is {}.", _OPPOSITES),
            ("What does a {} make?", "A {} makes {}.", _MAKERS),
            ("Which colour has {}?", "The colour of {} is {}.", _COLOURS),
        )
    ]
    longest = max(map(len, kinds))
    return [kind[i] for i in range(longest) for kind in kinds if i < len(kind)]


def school_workload(
    *,
    num_system_prompts: int,
    system_prompt_words: int,
    questions_per_prompt: int,
    seed: int = 0,
) -> list[Conversations]:
    """One class of children for each system prompt; all ask the same, in an order of their own.

    Args:
        system_prompt_words: at most so many of the system prompt.

    Raises:
        ValueError: a count is out of its range.
    """
    check_at_least(
        1, num_system_prompts=num_system_prompts, questions_per_prompt=questions_per_prompt
    )
    questions = [form.format(each) for form, about in _ASKED.items() for each in about.split(", ")]
    if questions_per_prompt > len(questions):
        raise ValueError(
            f"questions_per_prompt is {questions_per_prompt}, expected at most {len(questions)}: "
            "there are no more"
        )
    rng = np.random.default_rng(seed)
    workload = []
    for number in range(num_system_prompts):
        text = f"{SYSTEM_PROMPT} This is class {number + 1}."
        chosen = rng.choice(len(questions), questions_per_prompt, replace=False)
        workload.append(
            Conversations(
                " ".join(text.split()[:system_prompt_words]),
                [Question(questions[i]) for i in chosen],
                examples(),
            )
        )
    return workload
