# SPDX-License-Identifier: Apache-2.0
"""A table whose rows the recall model can answer.

Every row has a page of a ledger, the rules of a district and a gate that the page has an entry for.
A prompt ends with the gate, which the model continues with the entry's two words.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_relay.demo.words import ADJECTIVES
from vllm_relay.demo.workload import WORDS_PER_ENTRY, check_at_least, ledger_entries
from vllm_relay.tables.jobs.prompts.format import PromptTemplate
from vllm_relay.tables.outputs import Output
from vllm_relay.tables.question import Question

ANSWER_TOKENS = 2
TEMPLATE = PromptTemplate(
    before="{question}\n\n", field="{text} ", after="", base_after="", chat=False
)
NUM_PAGES = 12
PAGE_TOKENS = 480
NUM_DISTRICTS = 6
GATES_PER_PAGE = 24
_RULES_PER_DISTRICT = 8
_RULES = [
    "Every traveller of the {adjective} league is asked for the watchwords at the gate.",
    "The keeper of the {adjective} ledger is to find the page and read what is written.",
    "Tell the two words of the {adjective} gate to the traveller who asked for it.",
    "Which page holds the words is written in the {adjective} ledger of the keeper.",
    "Please answer the {adjective} traveller at every gate on the open page of the ledger.",
]


@dataclass(frozen=True)
class TableQuestion:
    """
    Attributes:
        question: to every row.
        answers: the right one for each row, without spaces around it.
    """

    question: Question
    answers: list[str]


@dataclass(frozen=True)
class TablesWorkload:
    """
    Attributes:
        columns: of the table, cells by name.
        questions: to every row.
    """

    columns: dict[str, list[str]]
    questions: list[TableQuestion]

    @property
    def num_rows(self) -> int:
        return len(next(iter(self.columns.values())))


def tables_workload(*, num_rows: int, seed: int) -> TablesWorkload:
    """Rows drawn at random, so that pages, districts and whole rows come again and again.

    A gate stands on one page and in one district.

    Raises:
        ValueError: `num_rows` is below 1.
    """
    check_at_least(1, num_rows=num_rows)
    rng = np.random.default_rng(seed)
    pages = [ledger_entries(rng, PAGE_TOKENS // WORDS_PER_ENTRY) for _ in range(NUM_PAGES)]
    page_texts = ["\n".join(f"{a} {b}: {c} {d}." for a, b, c, d in entries) for entries in pages]
    districts = [_rules(rng) for _ in range(NUM_DISTRICTS)]
    gates: dict[tuple[str, str], tuple[int, int, int]] = {}
    for page, entries in enumerate(pages):
        free = [i for i, entry in enumerate(entries) if entry[:2] not in gates]
        for i in rng.choice(free, GATES_PER_PAGE, replace=False):
            gates[entries[i][:2]] = page, int(i), int(rng.integers(NUM_DISTRICTS))
    drawn = [list(gates.values())[number] for number in rng.integers(len(gates), size=num_rows)]
    rows = [(pages[page][i], page_texts[page], districts[district]) for page, i, district in drawn]
    columns = {
        "district": [district for _, _, district in rows],
        "page": [page for _, page, _ in rows],
        "gate": [f"{city} {place}" for (city, place, _, _), _, _ in rows],
    }
    words = [(first.lower(), second.lower()) for (_, _, first, second), _, _ in rows]
    fields = tuple(columns)
    choices = tuple(word.lower() for word in ADJECTIVES)
    two_words = Question(
        "Which two words are written for the gate?", fields, max_tokens=ANSWER_TOKENS
    )
    one_word = Question(
        "Which watchword is written at the gate?",
        fields,
        Output(choices=choices),
        max_tokens=ANSWER_TOKENS,
    )
    return TablesWorkload(
        columns,
        [
            TableQuestion(two_words, [f"{first} {second}" for first, second in words]),
            TableQuestion(one_word, [first for first, _ in words]),
        ],
    )


def _rules(rng: np.random.Generator) -> str:
    return " ".join(
        _RULES[rng.integers(len(_RULES))].format(
            adjective=ADJECTIVES[rng.integers(len(ADJECTIVES))]
        )
        for _ in range(_RULES_PER_DISTRICT)
    )
