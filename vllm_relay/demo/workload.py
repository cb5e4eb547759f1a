# SPDX-License-Identifier: Apache-2.0
"""What the demo asks: questions that share a few long system prompts.

For the recall model every system prompt is a ledger of entries like `Lisbon harbour: amber falcon.`
and a question ends in a city and a place, which the model continues with the two words of the entry
and then with the entries after it.  No two adjacent words occur twice in a ledger, so there is one
right continuation.  Every ledger is different: an answer read from the KV cache of another system
prompt is a wrong answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from vllm_relay.demo.words import ADJECTIVES, CITIES, NOUNS, PLACES

QUESTION_TEMPLATES = [
    "What are the watchwords of the {key}?",
    "Which two words open the {key}?",
    "Please tell us the words for the {key}.",
    "A traveller is asked for the words at the gate. Which words are written for the {key}?",
    "Find the page of the ledger and read the watchwords of the {key}.",
]
WORDS_PER_ENTRY = 4
_MAX_ENTRIES = 2000

_LEAGUES = ["northern", "southern", "golden", "silver", "noble", "ancient", "violet", "iron"]
_TOPICS = ["billing", "shipping", "returns", "warranty", "privacy", "installation", "accounts"]
_RULES = [
    "Section {n}. When a customer asks about {topic}, confirm the order number {number} first.",
    "Section {n}. Requests about {topic} are answered within {number} hours, also on holidays.",
    "Section {n}. The team for {topic} can be reached at extension {number} on working days.",
    "Section {n}. Never promise more than {number} percent off when the subject is {topic}.",
]


@dataclass(frozen=True)
class Question:
    """A question to one system prompt; `continuation` is what must follow it, if that is known."""

    text: str
    continuation: str | None = None


@dataclass(frozen=True)
class Conversations:
    """A system prompt and the questions asked under it, each in a conversation of its own.

    Attributes:
        examples: questions and answers that come before each question.
    """

    system_prompt: str
    questions: list[Question]
    examples: list[tuple[str, str]] = field(default_factory=list)


def ledger_workload(
    *,
    num_system_prompts: int,
    system_prompt_tokens: int,
    questions_per_prompt: int,
    output_tokens: int,
    seed: int = 0,
) -> list[Conversations]:
    """Ledgers and questions with known answers, for the recall model (one word is one token).

    Args:
        num_system_prompts: number of ledgers, at least 1.
        system_prompt_tokens: length of a ledger, to within an entry.
        questions_per_prompt: questions to each ledger, about different entries, in random order.
        output_tokens: length of every known continuation, at least 2.
        seed: the same seed gives the same workload.

    Raises:
        ValueError: a count is out of its range or the ledger has too few entries for the questions.
    """
    check_at_least(
        1, num_system_prompts=num_system_prompts, questions_per_prompt=questions_per_prompt
    )
    check_at_least(2, output_tokens=output_tokens)
    rng = np.random.default_rng(seed)
    return [
        _ledger_conversations(
            rng, i, system_prompt_tokens, questions_per_prompt, output_tokens=output_tokens
        )
        for i in range(num_system_prompts)
    ]


def handbook_workload(
    *,
    num_system_prompts: int,
    system_prompt_words: int,
    questions_per_prompt: int,
    seed: int = 0,
) -> list[Conversations]:
    """Handbooks in plain English and questions about them, for any model: no answers are known."""
    check_at_least(
        1, num_system_prompts=num_system_prompts, questions_per_prompt=questions_per_prompt
    )
    rng = np.random.default_rng(seed)
    conversations = []
    for handbook in range(num_system_prompts):
        words = f"You answer customers of company {handbook + 1} by this handbook.".split()
        section = 0
        while len(words) < system_prompt_words:
            section += 1
            rule = _RULES[rng.integers(len(_RULES))].format(
                n=section, topic=_TOPICS[rng.integers(len(_TOPICS))], number=rng.integers(2, 99)
            )
            words.extend(rule.split())
        questions = [
            Question(
                f"Customer {i + 1} has a question about {_TOPICS[rng.integers(len(_TOPICS))]}. "
                f"What does section {rng.integers(1, section + 1)} say?"
                if section
                else f"Customer {i + 1} says hello. What do you answer?"
            )
            for i in range(questions_per_prompt)
        ]
        conversations.append(Conversations(" ".join(words[:system_prompt_words]), questions))
    return conversations


def _ledger_conversations(
    rng: np.random.Generator,
    index: int,
    system_prompt_tokens: int,
    num_questions: int,
    *,
    output_tokens: int,
) -> Conversations:
    intro = (
        f"You are the keeper of the {_LEAGUES[index % len(_LEAGUES)]} league. "
        "The ledger holds the two watchwords of every gate."
    )
    num_entries = (system_prompt_tokens - len(intro.split())) // WORDS_PER_ENTRY
    num_askable = num_entries - (output_tokens + 2) // WORDS_PER_ENTRY
    if num_askable < num_questions:
        raise ValueError(
            f"a ledger of {system_prompt_tokens} tokens has {max(num_askable, 0)} entries with "
            f"{output_tokens} tokens after them, expected at least {num_questions}: "
            "make the system prompts longer or ask less"
        )
    entries = ledger_entries(rng, num_entries)
    words = [word for entry in entries for word in entry]
    questions = []
    for i in rng.choice(num_askable, num_questions, replace=False):
        template = QUESTION_TEMPLATES[rng.integers(len(QUESTION_TEMPLATES))]
        answer_begin = i * WORDS_PER_ENTRY + 2
        questions.append(
            Question(
                template.format(key=" ".join(entries[i][:2])),
                " ".join(words[answer_begin : answer_begin + output_tokens]),
            )
        )
    lines = [f"{city} {place}: {adjective} {noun}." for city, place, adjective, noun in entries]
    return Conversations("\n".join([intro, *lines]), questions)


def ledger_entries(rng: np.random.Generator, num_entries: int) -> list[tuple[str, str, str, str]]:
    """Entries (city, place, adjective, noun) in which no two adjacent words occur twice."""
    if num_entries > _MAX_ENTRIES:
        raise ValueError(
            f"a ledger of {num_entries} entries is too long, expected at most {_MAX_ENTRIES}: "
            "there are not enough pairs of words that differ"
        )
    columns = [CITIES, PLACES, ADJECTIVES, NOUNS]
    unused: dict[str, list[str]] = {}  # behind each word; no two columns have a word in common
    text: list[str] = []
    while len(text) < num_entries * WORDS_PER_ENTRY:
        column = columns[len(text) % WORDS_PER_ENTRY]
        words = unused.setdefault(text[-1], [*column]) if text else column
        word = words[rng.integers(len(words))]
        if text:
            words.remove(word)
        text.append(word)
    return list(zip(*(text[i::WORDS_PER_ENTRY] for i in range(WORDS_PER_ENTRY)), strict=True))


def check_at_least(least: int, **values: int) -> None:
    """Refuse a size that is too small.

    Raises:
        ValueError: names it.
    """
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{name} is {value}, expected at least {least}")
