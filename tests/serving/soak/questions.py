# SPDX-License-Identifier: Apache-2.0
"""Prompts that begin alike, prompts with modules, and what the server answers to each alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from tests.integration.runs import num_comparable
from tests.serving.soak.client import Answer, Client

OUTPUT_TOKENS = 40
ADAPTERS = ("tiny", "first", "second")
"""The names of the model and of its adapters."""
_PREFIX_TOKENS = (64, 96, 160, 224)
_IMPORTS = ("<one/>", '<one word="{}"/><left/>', "<two/><right/>", "<one/><two/>", "<left/><two/>")
_MODES = ({}, {"mode": "repair", "repair_tokens": 5}, {"mode": "exact"})
POSTED, CONFIGURED = "posted", "configured"


@dataclass
class Question:
    """What is asked, and the answer with the leads of its tokens."""

    body: dict[str, Any]
    prefix: int | None = None
    expected: dict[str, Any] = field(default_factory=dict)

    def is_answered_by(self, answer: Answer, num_tokens: int) -> bool:
        """Up to the first token that rounding may decide."""
        if len(answer.token_ids) != num_tokens or answer.finish_reason != "length":
            return False
        end = min(num_comparable(self.expected), num_tokens)
        return answer.token_ids[:end] == self.expected["token_ids"][:end]


class Questions:
    """
    Args:
        words: each one token.
    """

    def __init__(self, words: list[str], seed: int) -> None:
        self._random = random.Random(seed)
        self._words = words
        self.prefixes = [
            [self._random.randrange(3, 500) for _ in range(tokens)] for tokens in _PREFIX_TOKENS
        ]
        self.schemas = {name: self._schema(name) for name in (POSTED, CONFIGURED)}
        self.plain = [
            Question({"model": adapter, "prompt": [*prefix, *end]}, number)
            for number, prefix in enumerate(self.prefixes)
            for end in ([7, 8, 9 + number], [11] * (17 + 20 * number))
            for adapter in ADAPTERS
        ]
        self.modular = [
            Question({"model": adapter, "relay": {"schema": name, "prompt": markup, **mode}})
            for name in self.schemas
            for number, imports in enumerate(_IMPORTS)
            for markup in [f"{imports.format(self._text(2))} {self._text(3)}"]
            for mode in [
                ({}, {"mode": "repair", "repair_tokens": 5}, {"mode": "exact"})[number % 3]
            ]
            for adapter in (ADAPTERS[number % 2],)
        ]

    def _text(self, num_words: int) -> str:
        return " ".join(self._random.choices(self._words, k=num_words))

    def _schema(self, name: str) -> str:
        def module(name: str, num_words: int, more: str = "") -> str:
            return f'<module name="{name}">{self._text(num_words)}{more}</module>'

        left, right = module("left", 40), module("right", 25)
        parameter = ' <param name="word" len="4"/>'
        return (
            f'<schema name="{name}">{self._text(20)} {module("one", 50, parameter)}'
            f"<union>{left}{right}</union>{module('two', 35)}</schema>"
        )

    async def answer(self, client: Client) -> None:
        """Ask each alone, with nothing in the cache for it."""
        for number, question in enumerate((*self.plain, *self.modular)):
            more = {"logprobs": 2, "return_tokens_as_token_ids": True}
            body = question.body | greedy(OUTPUT_TOKENS) | more
            answer = await client.complete("alone", body | {"cache_salt": f"alone-{number}"})
            assert answer.status == 200, (body, answer)
            assert len(answer.token_ids) == len(answer.leads) == OUTPUT_TOKENS, answer
            question.expected = {"token_ids": answer.token_ids, "leads": answer.leads}

    async def check_alone(self, client: Client) -> None:
        """Ask each again, when all is over."""
        for question in (*self.plain, *self.modular):
            answer = await client.complete("alone again", question.body | greedy(OUTPUT_TOKENS))
            if not question.is_answered_by(answer, OUTPUT_TOKENS):
                client.record.problem("wrong", f"{question}: {answer}")


def greedy(max_tokens: int) -> dict[str, Any]:
    """So many of the best tokens."""
    return {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
