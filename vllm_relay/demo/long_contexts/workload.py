# SPDX-License-Identifier: Apache-2.0
"""What is asked of long contexts: one document of thousands of tokens and what is written in it.

For the recall model the document is a chronicle: entries like `Written at Lisbon harbour: amber
falcon.` spread over it from beginning to end, and sentences between them that tell of the same
cities, places and animals.  A question ends in a city and a place, which the model continues with
the words of the entry.  In the sentences no word of a list stands beside another one; in entries
they do, and no two of them stand side by side twice.  So there is one right continuation.
"""

from __future__ import annotations

import re

import numpy as np

from vllm_relay.demo.words import ADJECTIVES, CITIES, NOUNS, PLACES
from vllm_relay.demo.workload import QUESTION_TEMPLATES, Conversations, Question

MIN_DOCUMENT_TOKENS, MAX_DOCUMENT_TOKENS = 4096, 32_000
MIN_OUTPUT_TOKENS, MAX_OUTPUT_TOKENS = 2, 8

_INTRO = "You are the keeper of a ledger. Please find what is written in it. Read every page."
_TOKENS_PER_ENTRY = 20
_MAX_ENTRIES = 400
_HEADINGS = ["Written at", "Words for", "Watchwords of", "Asked in"]
_WORDS = {"city": CITIES, "place": PLACES, "adjective": ADJECTIVES, "noun": NOUNS}

# with sentences of 4, 5, 6 and 7 tokens every gap of 4 tokens or more can be filled
_SENTENCES = [
    "Who is in {city}?",
    "It was {adjective} in {city}.",
    "A traveller asked for {city}.",
    "The keeper of {city} is {adjective}.",
    "Who holds the {noun} of {city}?",
    "The {noun} is at the {place}.",
    "In {city} every {noun} was {adjective}.",
    "The answer of {city} was the {noun}.",
    "Every gate in {city} was open to us.",
    "The {noun} and the {noun} are {adjective}.",
    "A traveller to {city} asked for the {noun}.",
    "The traveller asked at the {place} for the {noun}.",
    "Two of us are asked to find the {place}.",
    "The league of {city} asked for an answer at the {place}.",
]
_LENGTHS = [len(sentence.split()) for sentence in _SENTENCES]
_SHORTEST = min(_LENGTHS)


def max_questions(document_tokens: int) -> int:
    """How many entries a document of this length has, each of which can be asked for once."""
    return min(_MAX_ENTRIES, (document_tokens - len(_INTRO.split())) // _TOKENS_PER_ENTRY)


def chronicle_workload(
    *, document_tokens: int, num_questions: int, output_tokens: int = 2, seed: int = 0
) -> Conversations:
    """A document and questions with known answers, for the recall model (one word is one token).

    Args:
        document_tokens: length of the document, 4096 to 32000.
        num_questions: about different entries, from the first to the last, in random order; up to
            `max_questions`, which is 200 or more.
        output_tokens: length of every known continuation, 2 to 8.
        seed: the same seed gives the same document and the same questions.

    Raises:
        ValueError: a number is out of its range.
    """
    num_entries = max_questions(document_tokens)
    for name, value, least, most in [
        ("document_tokens", document_tokens, MIN_DOCUMENT_TOKENS, MAX_DOCUMENT_TOKENS),
        ("output_tokens", output_tokens, MIN_OUTPUT_TOKENS, MAX_OUTPUT_TOKENS),
        ("num_questions", num_questions, 1, num_entries),
    ]:
        if not least <= value <= most:
            raise ValueError(f"{name} is {value}, expected {least} to {most}")
    rng = np.random.default_rng(seed)
    entries = _entries(rng, num_entries, output_tokens)
    asked = np.linspace(0, num_entries - 1, num_questions).astype(int)
    questions = [
        Question(
            QUESTION_TEMPLATES[rng.integers(len(QUESTION_TEMPLATES))].format(
                key=" ".join(entries[i][:2])
            ),
            " ".join(entries[i][2:]),
        )
        for i in rng.permutation(asked)
    ]
    return Conversations(_document(rng, entries, document_tokens), questions)


def _entries(rng: np.random.Generator, num_entries: int, output_tokens: int) -> list[list[str]]:
    """City, place, adjective, noun, adjective, ... in which no two adjacent words occur twice."""
    used: set[tuple[str, str]] = set()
    entries = []
    for _ in range(num_entries):
        entry = [CITIES[rng.integers(len(CITIES))]]
        for i in range(1 + output_tokens):
            column = PLACES if i == 0 else ADJECTIVES if i % 2 else NOUNS
            unused = [word for word in column if (entry[-1], word) not in used]
            word = unused[rng.integers(len(unused))]
            used.add((entry[-1], word))
            entry.append(word)
        entries.append(entry)
    return entries


def _document(rng: np.random.Generator, entries: list[list[str]], document_tokens: int) -> str:
    """The entries at even distances, the last one at the end, and sentences between them."""
    lines = [_INTRO]
    num_tokens = len(_INTRO.split())
    ends = np.linspace(num_tokens, document_tokens, len(entries) + 1).astype(int)[1:]
    for entry, end in zip(entries, ends.tolist(), strict=True):
        heading = _HEADINGS[rng.integers(len(_HEADINGS))]
        line_tokens = len(heading.split()) + len(entry)
        sentences = _sentences(rng, end - num_tokens - line_tokens)
        pairs = [" ".join(entry[i : i + 2]) for i in range(0, len(entry), 2)]
        lines.append(" ".join([*sentences, f"{heading} {pairs[0]}: {', '.join(pairs[1:])}."]))
        num_tokens = end
    return "\n".join(lines)


def _sentences(rng: np.random.Generator, num_tokens: int) -> list[str]:
    """Sentences of exactly so many tokens together, 4 or more."""
    sentences = []
    while num_tokens:
        fitting = [
            sentence
            for sentence, length in zip(_SENTENCES, _LENGTHS, strict=True)
            if num_tokens == length or num_tokens >= length + _SHORTEST
        ]
        sentence = fitting[rng.integers(len(fitting))]
        num_tokens -= len(sentence.split())
        sentences.append(re.sub(r"{(\w+)}", lambda m: str(rng.choice(_WORDS[m[1]])), sentence))
    return sentences
