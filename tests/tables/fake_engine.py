# SPDX-License-Identifier: Apache-2.0
"""An engine that reads prompts as a test does, and answers with a function of their fields."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from vllm_relay.tables.engines.base import (
    Completion,
    Completions,
    Prompt,
    PromptShape,
)
from vllm_relay.tables.ordering.cached_tokens import BlockCache
from vllm_relay.tables.question import Question

Fields = dict[str, str]
"""A prompt's fields, by name; the values are JSON."""


def fields_of(message: str, question: Question) -> Fields:
    """What the default template wrote.

    Raises:
        AssertionError: it is something else.
    """
    _, _, lines = message.partition("\n\n")
    lines = lines.removesuffix("\nAnswer:")
    found: Fields = {}
    for line in lines.split("\n"):
        names = [name for name in question.fields if line.startswith(f'"{name}": ')]
        assert len(names) == 1, f"no field in {line!r}"
        value = line.removeprefix(f'"{names[0]}": ')
        json.loads(value)
        assert names[0] not in found, f"{names[0]} is there twice"
        found[names[0]] = value
    assert found.keys() == set(question.fields)
    return found


def echo(fields: Fields) -> str:
    """An answer from which all fields can be read, whatever their order in the prompt."""
    return json.dumps(dict(sorted(fields.items())), ensure_ascii=False)


class RefusedPrompt(Exception):
    """Raised by the function that answers."""


@dataclass
class _Running:
    prompt: Prompt
    completion: Completion
    tokens_left: int


@dataclass
class FakeEngine:
    """
    Attributes:
        answer: of the fields of a prompt; may raise `RefusedPrompt`.
        num_answer_tokens: of every answer.
        answer_limit: fewer tokens than a question's `max_tokens`, if there are any.
        before_step: called before each step; may raise what an engine may.
        step_s: how long a step takes, one token of each running request.
        token_log: a file that gets a line with the number of tokens of each step.
        prompts: all that were taken.
        num_steps: of all calls.
        num_aborted: requests that were unfinished when an iterator was closed.
    """

    answer: Callable[[Fields], str] = echo
    identity: str = "fake"
    tokenizer: Any | None = None
    cache: BlockCache | None = None
    max_model_len: int | None = None
    max_running: int = 8
    reasons: bool = False
    num_answer_tokens: int = 1
    answer_limit: int | None = None
    before_step: Callable[[int], None] | None = None
    step_s: float = 0.0
    token_log: Path | None = None
    prompts: list[Prompt] = field(default_factory=list)
    num_steps: int = 0
    num_aborted: int = 0
    is_closed: bool = False

    def generate(self, prompts: Iterable[Prompt], question: Question) -> Completions:
        source = iter(prompts)
        waiting: deque[_Running] = deque()
        running: list[_Running] = []
        try:
            while True:
                num_before = len(self.prompts)
                for prompt in islice(source, 2 * self.max_running - len(waiting) - len(running)):
                    self.prompts.append(prompt)
                    request = self._request(prompt, question)
                    if request.completion.error:
                        yield request.completion
                    else:
                        waiting.append(request)
                while waiting and len(running) < self.max_running:
                    running.append(waiting.popleft())
                if not running and len(self.prompts) == num_before:
                    return
                self._step(running)
                done = [each.completion for each in running if each.tokens_left == 0]
                running = [each for each in running if each.tokens_left]
                yield from done
        finally:
            self.num_aborted += len(waiting) + len(running)

    def max_answer_tokens(self, question: Question) -> int:
        return self.answer_limit or question.max_tokens

    def prompts_per_s(self, shape: PromptShape, question: Question) -> float | None:
        return None

    def close(self) -> None:
        self.is_closed = True

    def _request(self, prompt: Prompt, question: Question) -> _Running:
        try:
            text = self.answer(fields_of(prompt.message, question))
        except RefusedPrompt as error:
            return _Running(prompt, Completion(prompt.number, error=str(error)), 0)
        completion = Completion(
            prompt.number,
            text,
            num_prompt_tokens=len(prompt.token_ids) or -(-len(prompt.message) // 4),
            num_output_tokens=self.num_answer_tokens,
        )
        return _Running(prompt, completion, self.num_answer_tokens)

    def _step(self, running: list[_Running]) -> None:
        if self.before_step is not None and running:
            self.before_step(self.num_steps)
        self.num_steps += 1
        if self.step_s:
            time.sleep(self.step_s)
        for request in running:
            request.tokens_left -= 1
        if self.token_log is not None:
            with self.token_log.open("a") as file:
                file.write(f"{len(running)}\n")
