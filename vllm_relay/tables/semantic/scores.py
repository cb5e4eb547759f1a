# SPDX-License-Identifier: Apache-2.0
"""How likely a model takes a statement about a row for true."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import replace

from vllm_relay.tables.engines.base import (
    Completion,
    Completions,
    Engine,
    Prompt,
    PromptShape,
)
from vllm_relay.tables.engines.lazy import LazyEngine
from vllm_relay.tables.jobs.answers import with_max_tokens
from vllm_relay.tables.outputs import AnswerError, Output
from vllm_relay.tables.question import Question

TRUTH = Output("bool")


class ScoringEngine(LazyEngine):
    """An `Engine` whose answers are probabilities that the answer is true, as decimal numbers.

    They come from the probabilities of the answer's first token, or are 0 or 1 by the answer where
    the engine has none of these.

    Args:
        engine: that answers with true or false.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(lambda: engine)
        self.identity = f"{engine.identity} scores"
        self.modules_refusal = "scores need no prompt modules"

    def question(self, question: Question) -> Question:
        """What this engine is asked instead of a question with an answer of type "bool"."""
        told = with_max_tokens(replace(question, output=TRUTH), self._engine)
        text = f"{question.text}\n{TRUTH.description}"
        return replace(told, text=text, output=Output())

    def generate(self, prompts: Iterable[Prompt], question: Question) -> Completions:
        with closing(super().generate_scored(prompts, self._inner(question))) as completions:
            for completion in completions:
                yield _scored(completion)

    def max_answer_tokens(self, question: Question) -> int:
        return super().max_answer_tokens(self._inner(question))

    def prompts_per_s(self, shape: PromptShape, question: Question) -> float | None:
        return super().prompts_per_s(shape, self._inner(question))

    def close(self) -> None:
        """The engine is its owner's."""

    @staticmethod
    def _inner(question: Question) -> Question:
        return replace(question, output=TRUTH)


def probability_of_true(logprobs: Mapping[str, float]) -> float | None:
    """Of the tokens that begin "true" or "false", in any case; None if there is none.

    Args:
        logprobs: logarithms of the probabilities of an answer's first token.
    """
    masses = {True: 0.0, False: 0.0}
    for token, logprob in logprobs.items():
        text = token.strip().lower()
        for value in masses:
            if text and str(value).lower().startswith(text):
                masses[value] += math.exp(logprob)
    total = sum(masses.values())
    return masses[True] / total if total > 0 else None


def _scored(completion: Completion) -> Completion:
    if completion.error:
        return completion
    found = completion.first_logprobs
    score = None if found is None else probability_of_true(found)
    if score is None:
        try:
            score = float(TRUTH.parse(completion.text))
        except AnswerError as error:
            return replace(completion, text="", error=str(error))
    # a score is a whole answer
    return replace(completion, text=f"{score:.9f}", is_cut=False)
