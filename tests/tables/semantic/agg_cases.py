# SPDX-License-Identifier: Apache-2.0
"""Records whose answers can be computed by hand, whatever the tree of partial answers is."""

from __future__ import annotations

import json
from collections.abc import Callable

from tests.tables.byte_tokenizer import byte_tokenizer
from tests.tables.recording_engine import RecordingEngine, Row


def summed(row: Row) -> str:
    """The sum of the field x of records, or of partial sums."""
    return str(sum(each["x"] if isinstance(each, dict) else each for each in row["records"]))


def joined(row: Row) -> str:
    """The field s of records, one after the other, or partial texts."""
    return "".join(each["s"] if isinstance(each, dict) else each for each in row["records"])


def counting_engine(max_model_len: int, answer: Callable[[Row], str] = summed) -> RecordingEngine:
    """An engine whose tokens are bytes, nearly."""
    return RecordingEngine(answer, tokenizer=byte_tokenizer(), max_model_len=max_model_len)


def records_of(message: str) -> list[object]:
    line = next(line for line in message.split("\n") if line.startswith('"records": '))
    return json.loads(line.removeprefix('"records": '))


def is_combining(message: str) -> bool:
    return "partial answers" in message.partition("\n\n")[0]
