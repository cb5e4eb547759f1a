# SPDX-License-Identifier: Apache-2.0
"""What the model is to answer with, and how its text becomes a value of that type."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

if TYPE_CHECKING:
    from vllm_relay.tables.structs.schemas import StructColumn

OutputType = Literal["text", "int", "float", "bool", "json", "struct"]

AnswerValue: TypeAlias = "str | int | float | bool"

_BOOLS = ("true", "false")
_WRITTEN_TYPE = re.compile(r"[(\[]")
# what a BIGINT and a DOUBLE can hold, without leading zeros, so that an answer ends
_INT_PATTERN = r"-?(0|[1-9][0-9]{0,17})"
_FLOAT_PATTERN = _INT_PATTERN + r"(\.[0-9]{1,12})?"


class AnswerError(ValueError):
    """A text that is no value of the type asked for."""


@dataclass(frozen=True)
class Output:
    """
    Attributes:
        type: of the values. "json" and "struct" are given back as their text.
        choices: the texts that are allowed, for "text"; any text if empty.
        schema_json: the JSON schema that answers follow, as JSON, for "json" and "struct"; ""
            allows any object. That of a "struct" determines the type of a column, and its answers
            are checked against it.
        check: of a "struct", why the JSON of an answer is none for another reason; "" if it is one.

    Raises:
        ValueError: the type is not known, or a choice or a schema does not go with it.
    """

    type: OutputType = "text"
    choices: tuple[str, ...] = ()
    schema_json: str = ""
    check: Callable[[str], str] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.type not in get_args(OutputType):
            raise ValueError(
                f"return type {self.type!r} given, expected one of {list(get_args(OutputType))} or "
                f"a type of structs or lists such as 'STRUCT(title VARCHAR, score INTEGER)'"
            )
        if self.choices:
            _check_choices(self.type, self.choices)
        if self.schema_json and not self.is_json:
            raise ValueError(
                f"a JSON schema and return type {self.type!r} given: a schema goes with 'json' or "
                f"'struct'"
            )
        if self.type == "struct":
            # refused before anything is asked
            _ = self.struct

    @classmethod
    def of(
        cls,
        type: str | None = None,
        choices: Sequence[str] | None = None,
        schema: Mapping[str, Any] | str | None = None,
    ) -> Output:
        """What a user asks for; a schema without a type means "json".

        Args:
            type: its name, or a type of DuckDB of structs or lists, such as ``STRUCT(n INTEGER)``.

        Raises:
            ValueError: as for the class, or the schema is not one.
        """
        if isinstance(choices, str):
            raise _one_text(choices)
        if choices is not None and not choices:
            raise ValueError("an empty list of choices was given, expected at least one text")
        if type is not None and _WRITTEN_TYPE.search(type):
            if schema is not None:
                raise ValueError(
                    f"return type {type!r} and a JSON schema given: give one of them, or the type "
                    f"'struct', which the schema determines"
                )
            from vllm_relay.tables.structs.schemas import schema_of_type

            type, schema = "struct", schema_of_type(type)
        # models write properties in the schema's order, which is that of a struct's fields
        is_sorted = type != "struct"
        schema_json = "" if schema is None else _schema_json(schema, is_sorted)
        name: Any = type or ("json" if schema_json else "text")
        return cls(name, tuple(choices or ()), schema_json)

    @property
    def is_json(self) -> bool:
        """Whether answers are JSON."""
        return self.type in ("json", "struct")

    @cached_property
    def struct(self) -> StructColumn | None:
        """The column that a "struct" determines; None of other types."""
        if self.type != "struct":
            return None
        if not self.schema_json:
            raise ValueError(
                "return type 'struct' given without a JSON schema: give one, or write the type, as "
                "in 'STRUCT(title VARCHAR, score INTEGER)'"
            )
        # takes time to import
        from vllm_relay.tables.structs.schemas import StructColumn

        return StructColumn(json.loads(self.schema_json))

    @cached_property
    def constraint(self) -> dict[str, Any]:
        """Arguments of vLLM's StructuredOutputsParams; empty where any text is allowed."""
        if self._texts:
            return {"choice": list(self._texts)}
        if self.type == "int":
            return {"regex": _INT_PATTERN}
        if self.type == "float":
            return {"regex": _FLOAT_PATTERN}
        if self.is_json:
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
        if self.schema_json:
            return f"Answer with JSON of this schema: {self.schema_json}"
        return {
            "text": "",
            "int": "Answer with an integer.",
            "float": "Answer with a number.",
            "bool": "Answer with true or false.",
            "json": "Answer with a JSON object.",
        }[self.type]

    def completed(self, beginning: str) -> str | None:
        """The only text with this beginning; None if there are several, or none."""
        # a character whose bytes are not all there
        beginning = beginning.lstrip().rstrip("\ufffd")
        found = [each for each in self._texts if each.startswith(beginning)]
        return found[0] if len(found) == 1 else None

    def parse(self, text: str) -> AnswerValue:
        """The value that a text stands for; see `bare` for what may stand around it.

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
            if self.is_json:
                stripped = without_fence(text)
                parsed = json.loads(stripped, parse_constant=_no_constant)
                # DuckDB's JSON has no half of a surrogate pair
                json.dumps(parsed, ensure_ascii=False).encode()
                return stripped if self.struct is None else self._stored(parsed, stripped)
            return _int_of(bare(text)) if self.type == "int" else _float_of(bare(text))
        except AnswerError:
            raise
        except (ValueError, RecursionError):
            raise AnswerError(f"answer {text!r} is not of type {self.type}") from None

    def _stored(self, answer: Any, text: str) -> str:
        assert self.struct is not None
        try:
            stored = self.struct.text(answer)
        except ValueError as error:
            raise AnswerError(f"answer {text!r} does not fit its type: {error}") from None
        if self.check is not None and (reason := self.check(stored)):
            raise AnswerError(reason)
        return stored


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


def _schema_json(schema: Mapping[str, Any] | str, is_sorted: bool) -> str:
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else dict(schema)
        if not isinstance(parsed, dict):
            raise ValueError("it is not an object")
        return json.dumps(parsed, sort_keys=is_sorted)
    except (ValueError, TypeError) as error:
        raise ValueError(f"JSON schema {schema!r} given: {error}") from None


_FENCED = re.compile(r"```[A-Za-z]*\s*(.*?)\s*```", re.DOTALL)
_AROUND = (("**", "**"), ("`", "`"), ('"', '"'), ("'", "'"), ("\u201c", "\u201d"))
_TRUTHS = {"true": True, "yes": True, "false": False, "no": False}


def without_fence(text: str) -> str:
    """A text, or what its only code block holds if there is nothing else."""
    text = text.strip()
    found = _FENCED.fullmatch(text)
    return found[1] if found is not None and "```" not in found[1] else text


def bare(text: str) -> str:
    """A text without a code block, quotes, emphasis and a full stop around it."""
    text = without_fence(text)
    while True:
        before = text
        text = text.strip().removesuffix(".").rstrip()
        for begin, end in _AROUND:
            if len(text) > len(begin + end) and text.startswith(begin) and text.endswith(end):
                text = text[len(begin) : -len(end)]
        if text == before:
            return text


def chosen(text: str, choices: Sequence[str]) -> str | None:
    """The choice that a text is, or the only one that it is but for case and what `bare` leaves
    out; None if there is no such choice.
    """
    for each in (text.strip(), bare(text)):
        if each in choices:
            return each
    found = [each for each in choices if bare(each).casefold() == bare(text).casefold()]
    return found[0] if len(found) == 1 else None


def truth(text: str) -> bool | None:
    """Of true and false, yes and no, in any case; None if it is none of them."""
    return _TRUTHS.get(bare(text).lower())
