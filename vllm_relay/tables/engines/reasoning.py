# SPDX-License-Identifier: Apache-2.0
"""What models think before they answer is no part of the answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from vllm_relay.tables.engines.base import Completion

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
