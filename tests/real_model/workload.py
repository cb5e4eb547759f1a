# SPDX-License-Identifier: Apache-2.0
"""What the engines are asked: chats, a table, documents, and prompts of modules, all in English."""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer

from vllm_relay.demo.requests import WorkloadSizes, general_requests
from vllm_relay.demo.smollm2.library import HANDBOOK, library_workload
from vllm_relay.demo.workload import Conversations
from vllm_relay.modules.markup.schema import Module, Schema, Text
from vllm_relay.modules.prompt.schema_store import SchemaStore

BLOCK_SIZE_TOKENS = 32
FORCED_TEXT = "Thank you for writing to us"
FORCED_BRANCHES = 4
TOP_LOGPROBS = 20

TABLE = {
    "house": ["Harbour Street"] * 4 + ["Mill Lane"] * 4,
    "letter": [
        "The staff was friendly and found my book at once.",
        "I waited for an hour, and then the desk was closed.",
        "My children love the stories on Thursdays.",
        "The printer was broken again, and nobody cared.",
        "What a beautiful reading room, thank you!",
        "It was so loud that I could not work.",
        "The volunteers explained fractions better than my teacher.",
        "You lost the book that I had returned, and I had to pay.",
    ],
}
TABLE_QUESTION = "Which house does the letter come from?"
TABLE_CHOICES = ("Harbour Street", "Mill Lane")
IS_PRAISE = "Is the letter praise or a complaint?"
KINDS = ("praise", "complaint")
REPLY = "Write a reply to the letter."
REPLY_TOKENS = 12
LETTERS_SQL = f"""
    SELECT number, llm('{REPLY}', {{letter}}, max_tokens := {REPLY_TOKENS})
    FROM letters
    WHERE number > 0 AND llm('{IS_PRAISE}', {{letter}}, choices := {list(KINDS)}) = 'complaint'
    ORDER BY number
"""

DOCUMENT_TOKENS = 313  # ends in the middle of a block
SHARED_BEGINNING_TOKENS = 200
_DOCUMENT_QUESTION = "\n\nQuestion: What does it cost? Answer:"

_BEGINNING = "These are the rules of a city library. "
_MODULES = {
    "hours": "We are open from nine in the morning until eight in the evening, and on Saturdays "
    "from ten until four. The return box beside the door takes books at any hour. ",
    "loans": "You can borrow up to twenty items. Books stay with you for four weeks, films for two "
    "weeks, and board games for ten days. A day too late costs twenty cents. ",
    "rooms": "Four quiet rooms for two people and one for twelve can be booked two weeks ahead. "
    "Companies pay fifteen euros an hour, everybody else pays nothing. ",
}
_QUESTIONS = {
    ("hours", "loans"): "Question: For how long can I keep a film? Answer: You can keep it for",
    ("rooms", "hours"): "Question: What does a company pay? Answer: A company pays",
    ("loans",): "Question: How many books can I take? Answer: You can take",
}


def chats(model: str, *, num_branches: int, tokens: int, questions: int) -> list[list[int]]:
    """Prompts of chats: a question to each branch, then the next one, each of them other."""
    sizes = WorkloadSizes(num_branches, tokens, questions, output_tokens=2)
    requests = general_requests(model, sizes, 0, library_workload)
    return [request.prompt_token_ids for request in requests]


def rounds_of_chats(model: str) -> tuple[list[list[int]], list[list[int]]]:
    """A question to each branch, as where its system prompt is in use; then all others."""
    num_branches = 2
    prompts = chats(model, num_branches=num_branches, tokens=300, questions=8)
    return prompts[:num_branches], prompts[num_branches:]


def system_texts() -> list[str]:
    """Of two branches that `chats` does not ask."""
    return [branch.system_prompt for branch in _pinned_branches()]


def conversations() -> list[list[dict[str, str]]]:
    """Two questions to each of them."""
    return [
        [
            {"role": "system", "content": branch.system_prompt},
            {"role": "user", "content": question.text},
        ]
        for branch in _pinned_branches()
        for question in branch.questions
    ]


def _pinned_branches() -> list[Conversations]:
    return library_workload(
        num_system_prompts=4, system_prompt_words=150, questions_per_prompt=2, seed=7
    )[2:]


def documents(model: str) -> list[list[int]]:
    """Two parts of a handbook."""
    tokens = AutoTokenizer.from_pretrained(model).encode(HANDBOOK)
    return [
        tokens[first : first + DOCUMENT_TOKENS]
        for first in range(0, 2 * DOCUMENT_TOKENS, DOCUMENT_TOKENS)
    ]


def document_prompts(model: str, number: int) -> list[list[int]]:
    """A question to one of them, and to 200 of its tokens."""
    document = documents(model)[number]
    question = AutoTokenizer.from_pretrained(model).encode(_DOCUMENT_QUESTION)
    return [document + question, document[:SHARED_BEGINNING_TOKENS] + question]


def schema() -> Schema:
    modules = [Module(name, text) for name, text in _MODULES.items()]
    return Schema("library", Text(_BEGINNING), *modules)


def modular_prompts() -> list[str]:
    """In PML."""
    return [
        f'<prompt schema="library">{"".join(f"<{name}/>" for name in names)}{question}</prompt>'
        for names, question in _QUESTIONS.items()
    ]


def plain_prompts() -> list[str]:
    """The same in plain text; modules stand in the order of the schema."""
    return [
        _BEGINNING + "".join(_MODULES[name] for name in _MODULES if name in names) + question
        for names, question in _QUESTIONS.items()
    ]


def schema_store(tokenizer: Any) -> SchemaStore:
    store = SchemaStore(tokenizer, block_size=BLOCK_SIZE_TOKENS)
    store.add(schema())
    return store


def forced_prompts(model: str) -> list[list[int]]:
    """Eight questions to each branch."""
    return chats(model, num_branches=FORCED_BRANCHES, tokens=112, questions=8)


def forced_token_ids(model: str) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    return tokenizer.encode(FORCED_TEXT, add_special_tokens=False)
