# SPDX-License-Identifier: Apache-2.0
"""What a completion says of a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from vllm_relay.tables.outputs import AnswerError, AnswerValue, Output, OutputType, well_formed
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
        num_tokens: that the answer has.
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
