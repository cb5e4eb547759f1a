# SPDX-License-Identifier: Apache-2.0
"""An engine whose answers are a function of a row, and which remembers what it was asked."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm_relay.tables.engines.base import (
    Completion,
    Completions,
    Prompt,
    PromptShape,
)
from vllm_relay.tables.question import Question

Row = dict[str, Any]
"""What the prompt says of a row: the fields' values as their JSON has them."""


class Refusal(Exception):
    """A prompt that has no answer."""


def row_of(message: str, question: Question) -> Row:
    """The fields of a prompt of the default template."""
    _, _, lines = message.partition("\n\n")
    row: Row = {}
    for line in lines.removesuffix("\nAnswer:").split("\n"):
        [name] = [name for name in question.fields if line.startswith(f'"{name}": ')]
        assert name not in row
        row[name] = json.loads(line.removeprefix(f'"{name}": '))
    assert row.keys() == set(question.fields)
    return row


@dataclass
class RecordingEngine:
    """
    Attributes:
        answer: of a row; may raise `Refusal`.
        messages: of the prompts that were taken, in their order.
    """

    answer: Callable[[Row], str] = lambda row: json.dumps(row, sort_keys=True)
    messages: list[str] = field(default_factory=list)
    identity: str = "recording"
    tokenizer: Any | None = None
    cache: None = None
    max_model_len: int | None = None
    max_running: int = 4
    num_closed: int = 0

    def generate(self, prompts: Iterable[Prompt], question: Question) -> Completions:
        for prompt in prompts:
            self.messages.append(prompt.message)
            try:
                text = self.answer(row_of(prompt.message, question))
            except Refusal as error:
                yield Completion(prompt.number, error=str(error))
            else:
                yield Completion(prompt.number, text, num_prompt_tokens=10, num_output_tokens=1)

    def max_answer_tokens(self, question: Question) -> int:
        return question.max_tokens

    def prompts_per_s(self, shape: PromptShape, question: Question) -> None:
        return None

    def close(self) -> None:
        self.num_closed += 1
