# SPDX-License-Identifier: Apache-2.0
"""What the model is to answer with, and how its text becomes a value of that type."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from os.path import commonprefix
from typing import Any, Literal, TypeAlias, get_args

from vllm_relay.tables.reading import bare, chosen, truth, without_fence

OutputType = Literal["text", "int", "float", "bool", "json"]

AnswerValue: TypeAlias = "str | int | float | bool"

_SQL_TYPES: dict[OutputType, str] = {
    "text": "VARCHAR",
    "int": "BIGINT",
    "float": "DOUBLE",
    "bool": "BOOLEAN",
    "json": "JSON",
}
_BOOLS = ("true", "false")
# what a BIGINT and a DOUBLE can hold, without leading zeros, so that an answer ends
_INT_PATTERN = r"-?(0|[1-9][0-9]{0,17})"
_FLOAT_PATTERN = _INT_PATTERN + r"(\.[0-9]{1,12})?"


class AnswerError(ValueError):
    """A text that is no value of the type asked for."""


@dataclass(frozen=True)
class Output:
    """
    Attributes:
        type: of the values. "json" is given back as its text.
        choices: the texts that are allowed, for "text"; any text if empty.
        schema_json: the JSON schema that answers follow, as JSON, for "json"; "" allows any object.

    Raises:
        ValueError: the type is not known, or a choice or a schema does not go with it.
    """

    type: OutputType = "text"
    choices: tuple[str, ...] = ()
    schema_json: str = ""

    def __post_init__(self) -> None:
        if self.type not in get_args(OutputType):
            raise ValueError(
                f"return type {self.type!r} given, expected one of {list(get_args(OutputType))}"
            )
        if self.choices:
            _check_choices(self.type, self.choices)
        if self.schema_json and self.type != "json":
            raise ValueError(
                f"a JSON schema and return type {self.type!r} given: a schema goes with 'json'"
            )

    @classmethod
    def of(
        cls,
        type: str | None = None,
        choices: Sequence[str] | None = None,
        schema: Mapping[str, Any] | str | None = None,
    ) -> Output:
        """What a user asks for; a schema without a type means "json".

        Raises:
            ValueError: as for the class, or the schema is not one.
        """
        if isinstance(choices, str):
            raise _one_text(choices)
        if choices is not None and not choices:
            raise ValueError("an empty list of choices was given, expected at least one text")
        schema_json = "" if schema is None else _schema_json(schema)
        name: Any = type or ("json" if schema_json else "text")
        return cls(name, tuple(choices or ()), schema_json)

    @property
    def sql_type(self) -> str:
        """DuckDB's name of the type of the values."""
        return _SQL_TYPES[self.type]

    @cached_property
    def constraint(self) -> dict[str, Any]:
        """Arguments of vLLM's StructuredOutputsParams; empty where any text is allowed."""
        if self._texts:
            return {"choice": list(self._texts)}
        if self.type == "int":
            return {"regex": _INT_PATTERN}
        if self.type == "float":
            return {"regex": _FLOAT_PATTERN}
        if self.type == "json":
            return {"json": self.schema_json} if self.schema_json else {"json_object": True}
        return {}

    @property
    def _texts(self) -> tuple[str, ...]:
        """All that an answer may be; empty if they are not counted."""
        return _BOOLS if self.type == "bool" else self.choices

    @cached_property
    def num_deciding_tokens(self) -> int | None:
        """How many tokens tell any two texts apart, if the engine keeps to `constraint`: a token is
        at least a byte, or the text's end. None if texts are not counted.
        """
        if not self._texts:
            return None
        # of texts in order, neighbours have the most in common
        return max([1, *(_num_deciding_bytes(*pair) for pair in pairwise(sorted(self._texts)))])

    @property
    def description(self) -> str:
        """What the model is told of it, a sentence; empty where any text is allowed."""
        if self.choices:
            return f"Answer with one of: {', '.join(self.choices)}."
        return {
            "text": "",
            "int": "Answer with an integer.",
            "float": "Answer with a number.",
            "bool": "Answer with true or false.",
            "json": f"Answer with JSON of this schema: {self.schema_json}"
            if self.schema_json
            else "Answer with a JSON object.",
        }[self.type]

    def completed(self, beginning: str) -> str | None:
        """The only text with this beginning; None if there are several, or none."""
        # a character whose bytes are not all there
        beginning = beginning.lstrip().rstrip("\ufffd")
        found = [each for each in self._texts if each.startswith(beginning)]
        return found[0] if len(found) == 1 else None

    def parse(self, text: str) -> AnswerValue:
        """The value that a text stands for; see `reading` for what may stand around it.

        Raises:
            AnswerError: it stands for none.
        """
        if self.choices:
            choice = chosen(text, self.choices)
            if choice is None:
                raise AnswerError(f"answer {text!r} is none of {list(self.choices)}")
            return choice
        if self.type == "text":
            return text.strip()
        try:
            if self.type == "bool":
                if (value := truth(text)) is None:
                    raise ValueError
                return value
            if self.type == "json":
                stripped = without_fence(text)
                parsed = json.loads(stripped, parse_constant=_no_constant)
                # DuckDB's JSON has no half of a surrogate pair
                json.dumps(parsed, ensure_ascii=False).encode()
                return stripped
            return _int_of(bare(text)) if self.type == "int" else _float_of(bare(text))
        except (ValueError, RecursionError):
            raise AnswerError(f"answer {text!r} is not of type {self.type}") from None


def well_formed(text: str) -> str:
    """A text that can be written as UTF-8: halves of surrogate pairs are replaced."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _num_deciding_bytes(first: str, second: str) -> int:
    """Up to the first character that differs, with it; the end of a text counts as a byte."""
    common = commonprefix([first, second])
    differing = (each[len(common) : len(common) + 1] for each in (first, second))
    return len(common.encode()) + max(1, *(len(each.encode()) for each in differing))


def _int_of(text: str) -> int:
    value = int(text)
    if not _is_plain_number(text) or not -(1 << 63) <= value < 1 << 63:
        raise ValueError
    return value


def _float_of(text: str) -> float:
    value = float(text)
    if not _is_plain_number(text) or not math.isfinite(value):
        raise ValueError
    return value


def _is_plain_number(text: str) -> bool:
    # Python also takes 1_000 and digits of other scripts
    return text.isascii() and "_" not in text


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def _one_text(choices: str) -> ValueError:
    return ValueError(
        f"choices={choices!r} given, expected a list of texts: give {[choices]} or more"
    )


def _check_choices(type: str, choices: tuple[str, ...]) -> None:
    if isinstance(choices, str):
        raise _one_text(choices)
    if type != "text":
        raise ValueError(f"choices and return type {type!r} given: choices are texts")
    if not all(isinstance(choice, str) for choice in choices):
        raise ValueError(
            f"choices {list(choices)} given, expected texts: give {[str(each) for each in choices]}"
        )
    for choice in choices:
        if choice != well_formed(choice):
            raise ValueError(f"choice {choice!r} given, expected a text that can be UTF-8")
        if not choice or choice != choice.strip():
            raise ValueError(
                f"choice {choice!r} given, expected a text without spaces around it: an answer is "
                f"compared without them"
            )
    if len(set(choices)) < len(choices):
        raise ValueError(f"choices {list(choices)} given, expected different ones")


def _schema_json(schema: Mapping[str, Any] | str) -> str:
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else dict(schema)
        if not isinstance(parsed, dict):
            raise ValueError("it is not an object")
        return json.dumps(parsed, sort_keys=True)
    except (ValueError, TypeError) as error:
        raise ValueError(f"JSON schema {schema!r} given: {error}") from None
