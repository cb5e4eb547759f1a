# SPDX-License-Identifier: Apache-2.0
"""What models think before they answer is no part of the answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from vllm_relay.tables.engines.base import Completion
from vllm_relay.tables.question import Question

UNFINISHED = "the model was still reasoning where its answer was cut: give more max_tokens"

_TAGS = (("<think>", "</think>"), ("<thinking>", "</thinking>"), ("[THINK]", "[/THINK]"))

ReadAnswer: TypeAlias = "Callable[[str], str | None]"


def answer_in(text: str) -> str | None:
    """What follows the reasoning, or the text if there is none; None if the reasoning has no end.

    Chat templates may hold the tag that begins it, so that a text begins within.
    """
    for begin, end in _TAGS:
        before, found, answer = text.partition(end)
        if found and (begin not in text or before.lstrip().startswith(begin)):
            return answer
        if text.lstrip().startswith(begin):
            return None
    return text


def without_reasoning(completion: Completion, read: ReadAnswer = answer_in) -> Completion:
    """With what follows the reasoning as its text, or an error if nothing does."""
    if completion.error:
        return completion
    answer = read(completion.text)
    if answer is None:
        return replace(completion, text="", error=UNFINISHED)
    return replace(completion, text=answer)


def deciding_tokens(question: Question, *, reasons: bool) -> int | None:
    """As many as tell any two of a question's choices apart; None if it has none, or if the model
    reasons: it is held to the choices only afterwards."""
    return None if reasons else question.output.num_deciding_tokens


def most_answer_tokens(question: Question, *, reasons: bool) -> int:
    """Those that vLLM is told to write at most: the question's, or those that decide."""
    enough = deciding_tokens(question, reasons=reasons)
    return question.most_tokens if enough is None else min(enough, question.most_tokens)
