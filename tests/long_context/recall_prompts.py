# SPDX-License-Identifier: Apache-2.0
"""Random prompts for the recall model, and what it has to answer."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from tests.support.haystacks import make_haystack

DOCUMENT_TOKENS = 1200
NUM_FAMILIES, NUM_BRANCHES = 4, 3
SHORT_TOKENS = (8, 90)
LONG_TOKENS = (100, DOCUMENT_TOKENS)
OUTPUT_TOKENS = 24


@dataclass(frozen=True)
class Question:
    prompt: list[int]
    answer: list[int]


@cache
def document(family: int, branch: int) -> tuple[int, ...]:
    """Members of a family share their first 150 to 450 tokens."""
    root, own = (
        make_haystack(DOCUMENT_TOKENS + 2, seed=seed).prompt_token_ids[:-2]
        for seed in (family, 100 + NUM_BRANCHES * family + branch)
    )
    shared = 150 * (1 + branch)
    return (*root[:shared], *own[shared:])


def recalled(prompt: Sequence[int], num_tokens: int) -> list[int] | None:
    """What the recall model answers; None where not exactly one token can be right."""
    text = list(prompt)
    followers: dict[tuple[int, int], set[int]] = defaultdict(set)
    for first, second, third in zip(text, text[1:], text[2:], strict=False):
        followers[first, second].add(third)
    for _ in range(num_tokens):
        pair = (text[-2], text[-1])
        if len(followers[pair]) != 1:
            return None
        [token] = followers[pair]
        text.append(token)
    return text[len(prompt) :]


def ask(rng: random.Random, text: Sequence[int], num_tokens: int) -> Question:
    """Two adjacent tokens of the text are repeated at its end. The answer has `num_tokens` tokens;
    fewer where the text has no question with that much of one right answer.

    Raises:
        ValueError: the text has no question with one right answer.
    """
    while num_tokens:
        for _ in range(50):
            # position 0 is the beginning-of-sequence token
            begin = rng.randrange(1, len(text) - 2)
            prompt = [*text, *text[begin : begin + 2]]
            answer = recalled(prompt, num_tokens)
            if answer is not None:
                return Question(prompt, answer)
        num_tokens //= 2
    raise ValueError(f"nothing can be asked about a text of {len(text)} tokens")


def any_text(rng: random.Random) -> list[int]:
    """The first tokens of a document: few for a third of all."""
    whole = document(rng.randrange(NUM_FAMILIES), rng.randrange(NUM_BRANCHES))
    return list(whole[: rng.randint(*(SHORT_TOKENS if rng.random() < 0.33 else LONG_TOKENS))])
