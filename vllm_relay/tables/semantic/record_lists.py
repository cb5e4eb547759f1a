# SPDX-License-Identifier: Apache-2.0
"""Questions about a list of records, which is the only field of their prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from vllm_relay.tables.jobs.prompts.set_fields import list_elements
from vllm_relay.tables.outputs import AnswerValue, Output
from vllm_relay.tables.question import BRACES, Question, placeholders_of

RECORDS = "records"
"""The name of the field."""

_NAMES = " Names in braces are fields of its records."
_ALL = "\nThe question is about all records of the list together."
_PARTIAL = (
    "\nThe records are partial answers to the question, each about a part of what it is about, in "
    "their order: answer it for all of that."
)


def record_question(text: str, names: Sequence[str], output: Output, **others: Any) -> Question:
    """
    Args:
        text: in which ``{name}`` refers to the records' field of that name.
        others: of the `Question`.

    Raises:
        ValueError: the text refers to no field, or as for `Question`.
    """
    sentence = _ALL + _NAMES * bool(placeholders_of(text))
    return Question(escaped(text, names) + sentence, (RECORDS,), output, **others)


def escaped(text: str, names: Sequence[str]) -> str:
    """The text of a question about a record, for one whose fields are records: braces around names
    are text there.

    Raises:
        ValueError: the text refers to no field, or as for `Question`.
    """
    Question(text, tuple(names))
    return BRACES.sub(lambda found: found[0] if found[1] is None else f"{{{found[0]}}}", text)


def about_partial_answers(question: Question) -> Question:
    """The same question, about the answers that it had for parts of the records."""
    text = question.text.replace(_ALL, _PARTIAL, 1).removesuffix(_NAMES)
    # partial answers have an order
    return replace(question, text=text, set_fields=())


def known_records(records: str | None) -> list[str]:
    """The JSON of the records of a list, but for those of which nothing is known: they and all
    their fields are NULL.

    Args:
        records: a JSON list; None has no records.
    """
    elements = [] if records is None else list_elements(records)
    if elements is None:
        raise ValueError(f"{records!r} given, expected a JSON list of records")
    return [each for each in elements if _is_known(each)]


def records_of_table(texts: pa.Table) -> list[str | None]:
    """The JSON of each row, as DuckDB writes structs; None where nothing is known of it.

    Args:
        texts: JSON of the fields, or NULL.
    """
    names = [json.dumps(name, ensure_ascii=False) for name in texts.column_names]
    columns = [column.to_pylist() for column in texts.columns]
    found: list[str | None] = []
    for values in zip(*columns, strict=True):
        pairs = (f"{name}:{value or 'null'}" for name, value in zip(names, values, strict=True))
        is_known = any(value is not None for value in values)
        found.append(f"{{{','.join(pairs)}}}" if is_known else None)
    return found


def record_list(records: Sequence[str]) -> str:
    """The JSON of a list."""
    return f"[{','.join(records)}]"


def value_record(output: Output, value: AnswerValue) -> str:
    """The JSON of an answer."""
    if output.is_json:
        return json.dumps(json.loads(str(value)), ensure_ascii=False, separators=(",", ":"))
    return json.dumps(value, ensure_ascii=False)


def _is_known(record: str) -> bool:
    if "null" not in record:
        return True
    value = json.loads(record)
    return any(
        each is not None for each in (value.values() if isinstance(value, dict) else [value])
    )
