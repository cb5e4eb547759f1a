# SPDX-License-Identifier: Apache-2.0
"""What a completion says of a row, and how many tokens answers have."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from vllm_relay.tables.engines.base import Engine
from vllm_relay.tables.outputs import AnswerError, AnswerValue, Output, OutputType, well_formed
from vllm_relay.tables.question import DEFAULT_MAX_TOKENS, Question
from vllm_relay.tables.texts import shortened

ARROW_TYPES: dict[OutputType, pa.DataType] = {
    "text": pa.string(),
    "int": pa.int64(),
    "float": pa.float64(),
    "bool": pa.bool_(),
    "json": pa.string(),
    "struct": pa.string(),
}
"""Of the values of answers."""


@dataclass(frozen=True)
class Answer:
    """
    Attributes:
        value: None where there is none, or the row is NULL.
        error: why there is no value, or that it is not whole; None if nothing is wrong.
        is_cut: whether the answer ended at its last token, not by itself. A text that was cut is a
            value with an error; so is no number, of which the rest may be missing.
    """

    value: AnswerValue | None = None
    error: str | None = None
    is_cut: bool = False


def answer_table(answers: Sequence[Answer], output: Output) -> pa.Table:
    """The columns ``answer``, of the output's type, ``error`` and ``is_cut``."""
    return pa.table(
        {
            "answer": pa.array([each.value for each in answers], ARROW_TYPES[output.type]),
            "error": pa.array([each.error for each in answers], pa.string()),
            "is_cut": pa.array([each.is_cut for each in answers], pa.bool_()),
        }
    )


def error_answer(error: str) -> Answer:
    return Answer(error=shortened(well_formed(error)))


def read_answer(output: Output, text: str, num_tokens: int, is_cut: bool) -> Answer:
    """
    Args:
        is_cut: whether these were all that it could have.
    """
    cut = f"the answer was cut after {num_tokens:,} tokens: give more max_tokens"
    try:
        value = output.parse(text)
    except AnswerError as error:
        return Answer(None, f"{shortened(str(error))}{f'; {cut}' if is_cut else ''}", is_cut)
    if not is_cut or _is_whole(output, value):
        return Answer(value)
    # what is left of a number is another number
    return Answer(value if _is_text(output) else None, cut, True)


def _is_text(output: Output) -> bool:
    return output.type == "text" and not output.choices


def _is_whole(output: Output, value: AnswerValue) -> bool:
    """Whether nothing can follow an answer that was cut."""
    if output.choices:
        begin = str(value).casefold()
        others = [each for each in output.choices if each != value]
        return not any(each.casefold().startswith(begin) for each in others)
    return output.type == "bool" or (output.is_json and str(value)[-1:] in ("}", "]", '"'))


MOST_TEXT_TOKENS = 1024
"""Of an answer whose length is open: a text, JSON, or one that follows a reasoning."""
_PROMPT_SHARE = 4
"""The part of the context that answers of open length may have: one of so many."""
_END_TOKENS = 2
"""A space before an answer, and its end."""
# the longest that the types have
_LONGEST = {
    "int": ("-" + "9" * 18,),
    "float": ("-" + "9" * 18 + "." + "9" * 12,),
    "bool": ("true", "false"),
}
_USUAL = {"int": ("10",), "float": ("10.5",), "bool": ("true",)}
_TOKENS_PER_PROPERTY = 16


def with_max_tokens(question: Question, engine: Engine) -> Question:
    """The question with a number of tokens for its answers.

    Short types get what their longest value takes, and `DEFAULT_MAX_TOKENS` at least where that
    cannot be counted. Texts, JSON and answers after a reasoning get `MOST_TEXT_TOKENS`, or a
    quarter of the model's context; a prompt that leaves less to its answer is given what is left.
    """
    if question.max_tokens is not None:
        return question
    longest = question.output.choices or _LONGEST.get(question.output.type, ())
    if longest and not getattr(engine, "reasons", False):
        most = max(_lengths(longest, engine.tokenizer, is_bound=True)) + _END_TOKENS
        if engine.tokenizer is None:
            most = max(most, DEFAULT_MAX_TOKENS)
    else:
        most = MOST_TEXT_TOKENS
        if engine.max_model_len is not None:
            most = min(most, max(engine.max_model_len // _PROMPT_SHARE, DEFAULT_MAX_TOKENS))
    return replace(question, max_tokens=most)


def expected_tokens(question: Question, engine: Engine) -> int:
    """Of an answer with its end, about: as long as it may be where any text is allowed, unless
    nobody has said how long.

    Args:
        question: as it was given.
    """
    most = engine.max_answer_tokens(with_max_tokens(question, engine))
    texts = question.output.choices or _USUAL.get(question.output.type, ())
    if not texts:
        return min(most, question.most_tokens)
    lengths = _lengths(texts, engine.tokenizer)
    return min(round(sum(lengths) / len(lengths)) + 1, most)


def likely_cut(question: Question, engine: Engine, longest_prompt_tokens: int) -> str:
    """Why answers to the longest prompts may be cut, a sentence; "" if that is not likely.

    Args:
        question: as it was given: whoever gives `max_tokens` knows how long answers are.
    """
    if question.max_tokens is not None or engine.max_model_len is None:
        return ""
    left = engine.max_model_len - longest_prompt_tokens
    needed = _needed_tokens(question.output)
    if left >= needed:
        return ""
    return (
        f"the longest prompt leaves {max(left, 0)} of the model's {engine.max_model_len} tokens to "
        f"its answer, which may be cut: about {needed} are needed"
    )


def _needed_tokens(output: Output) -> int:
    if output.schema_json:
        return max(_num_properties(json.loads(output.schema_json)), 1) * _TOKENS_PER_PROPERTY
    return DEFAULT_MAX_TOKENS if output.type in ("text", "json") and not output.choices else 1


def _num_properties(schema: Any) -> int:
    """Of a JSON schema and those in it."""
    if isinstance(schema, list):
        return sum(map(_num_properties, schema))
    if not isinstance(schema, dict):
        return 0
    own = schema.get("properties")
    return (len(own) if isinstance(own, dict) else 0) + sum(map(_num_properties, schema.values()))


def _lengths(texts: Sequence[str], tokenizer: Any | None, *, is_bound: bool = False) -> list[int]:
    """Tokens of texts; without a tokenizer about as many, or no fewer than there may be."""
    if tokenizer is None:
        return [len(text.encode()) if is_bound else len(text) // 4 + 1 for text in texts]
    encoded = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    return [len(token_ids) for token_ids in encoded]
