# SPDX-License-Identifier: Apache-2.0
"""Tasks after RULER (Hsieh et al., 2404.06654), made offline: what is asked, and what is right.

A haystack carries the needles of all its questions, so that it is computed once. Questions end as a
needle begins, or show an example with its answer, as RULER does for some tasks: a model of 135
million parameters goes on with what it has seen and follows few instructions.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.sparse.real_heads.texts import files

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NUM_KEYS = 4
NUM_VALUES = 3
NUM_HOPS = 2
NUM_COMMON_WORDS = 3
TIMES_MORE_COMMON = 10


@dataclass(frozen=True)
class Question:
    """What is asked behind a haystack.

    Attributes:
        answer: the right one as the model would write it, behind the prompt.
        expected: strings that an answer should have.
        num_tokens: how long an answer may get.
    """

    task: str
    prompt: str
    answer: str
    expected: tuple[str, ...]
    num_tokens: int

    def score(self, answer: str) -> float:
        """The share of the expected strings that the answer has."""
        return sum(string in answer for string in self.expected) / len(self.expected)


@dataclass(frozen=True)
class Haystack:
    text: str
    questions: tuple[Question, ...]


def words() -> list[str]:
    """Of the documentation: five to eight lower-case letters."""
    text = " ".join(page.read_text() for page in files("English", "reporting"))
    return sorted(set(re.findall(r"(?<![\w/.`-])[a-z]{5,8}(?![\w/.`-])", text)))


def haystacks(tokenizer: Any, num_tokens: int, seed: int) -> list[Haystack]:
    """One with needles and one of common words; needles lie in repeated sentences where the seed is
    even, in the documentation where it is odd.
    """
    rng = random.Random(f"{seed} {num_tokens}")
    return [
        _needles(tokenizer, num_tokens, rng, noise=seed % 2 == 0),
        _common(num_tokens, tokenizer, rng),
    ]


def _needles(tokenizer: Any, num_tokens: int, rng: random.Random, noise: bool) -> Haystack:
    names = rng.sample(words(), NUM_KEYS + 3)
    single, many, password = names[NUM_KEYS:]
    keys = names[:NUM_KEYS]
    numbers = [str(rng.randrange(10**6, 10**7)) for _ in range(NUM_KEYS + NUM_VALUES)]
    values = numbers[NUM_KEYS:]
    of_key = dict(zip(keys, numbers, strict=False))
    variables = ["".join(rng.sample("ABCDEFGHILMNOPRSTUYZ", 3)) for _ in range(NUM_HOPS + 1)]
    value = str(rng.randrange(10_000, 100_000))

    needles = [f"The secret password of the {single} is: {password}."]
    needles += [_number_needle(key, number) for key, number in of_key.items()]
    needles += [_number_needle(many, number) for number in values]
    rng.shuffle(needles)
    assignments = [f"VAR {variables[0]} = {value}."]
    assignments += [f"VAR {b} = VAR {a}." for a, b in zip(variables, variables[1:], strict=False)]
    text = _haystack(tokenizer, num_tokens, needles, assignments, rng, noise)

    asked = rng.sample(keys, NUM_KEYS)
    questions = (
        Question(
            "single key", f"\n\nThe secret password of the {single} is:", f" {password}.",
            (password,), 6,
        ),
        Question(
            "multi-key", f"\n\nOne of the special magic numbers for {asked[0]} is:",
            f" {of_key[asked[0]]}.", (of_key[asked[0]],), 10,
        ),
        Question(
            "multi-value", f"\n\nThe {NUM_VALUES} special magic numbers for {many} are:",
            f" {', '.join(values)}.", tuple(values), 12 * NUM_VALUES,
        ),
        Question(
            "multi-query",
            f"\n\n{_both(asked[2:])} {of_key[asked[2]]} and {of_key[asked[3]]}."
            f"\n\n{_both(asked[:2])}",
            f" {of_key[asked[0]]} and {of_key[asked[1]]}.",
            (of_key[asked[0]], of_key[asked[1]]), 24,
        ),
        Question(
            "variable tracking",
            f"\n\nVAR JVQ = 90817. VAR KWX = VAR JVQ. {_assigned(2, '90817')} JVQ, KWX."
            f"\n\n{_assigned(len(variables), value)}",
            f" {', '.join(variables)}.", tuple(variables), 20,
        ),
    )  # fmt: skip
    return Haystack(text, questions)


def _both(keys: Sequence[str]) -> str:
    return f"The special magic numbers for {keys[0]} and {keys[1]}, in this order, are:"


def _assigned(count: int, value: str) -> str:
    return f"The {count} variables that are assigned the value {value} are:"


def _number_needle(key: str, number: str) -> str:
    return f"One of the special magic numbers for {key} is: {number}."


def _haystack(
    tokenizer: Any,
    num_tokens: int,
    needles: Sequence[str],
    chain: Sequence[str],
    rng: random.Random,
    noise: bool,
) -> str:
    """About `num_tokens` long, the needles at random places and the chain's parts in order."""
    wanted = num_tokens - len(tokenizer.encode(" ".join([*needles, *chain])))
    if noise:
        count = wanted // len(tokenizer.encode(" " + NOISE)) + 1
        pieces = [NOISE] * count
    else:
        text = " ".join(
            " ".join(page.read_text().split()) for page in files("English", "reporting")
        )
        encoded = tokenizer.encode(text, verbose=False)
        begin = rng.randrange(max(1, len(encoded) - wanted))
        pieces = tokenizer.decode(encoded[begin : begin + wanted]).split(". ")
        pieces = [piece.rstrip(".") + "." for piece in pieces]
    places = sorted(rng.sample(range(len(pieces) + len(needles)), len(chain)))
    for needle in needles:
        pieces.insert(rng.randrange(len(pieces) + 1), needle)
    for place, part in zip(places, chain, strict=True):
        pieces.insert(place, part)
    return " ".join(pieces)


def _common(num_tokens: int, tokenizer: Any, rng: random.Random) -> Haystack:
    """A numbered list in which few words come much more often than the others."""
    asked = f"The {NUM_COMMON_WORDS} words that appear most often in the list are:"
    example = "1. pencil 2. garden 3. pencil 4. violin 5. garden 6. bottle 7. violin"
    prompt = f"\n\n{example}\n\n{asked} pencil, garden, violin.\n\n{asked}"
    num_others = 2 * NUM_COMMON_WORDS * TIMES_MORE_COMMON
    unasked = [word for word in words() if word not in prompt]
    vocabulary = rng.sample(unasked, NUM_COMMON_WORDS + num_others)
    common, others = vocabulary[:NUM_COMMON_WORDS], vocabulary[NUM_COMMON_WORDS:]
    unit = common * TIMES_MORE_COMMON + others
    listed: list[str] = []
    while True:
        rng.shuffle(unit)
        numbered = [f"{len(listed) + i + 1}. {word}" for i, word in enumerate(unit)]
        if (
            listed
            and len(tokenizer.encode(" ".join(listed + numbered), verbose=False)) > num_tokens
        ):
            break
        listed += numbered
    question = Question(
        "common words", prompt, f" {', '.join(common)}.", tuple(common), 8 * NUM_COMMON_WORDS
    )
    return Haystack(" ".join(listed), (question,))
