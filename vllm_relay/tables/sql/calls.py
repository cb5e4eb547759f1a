# SPDX-License-Identifier: Apache-2.0
"""A call of llm() or llm_agg(): the question it asks, and the expressions of its fields."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlglot import exp

from vllm_relay.tables.images import ImageStore, image_fields
from vllm_relay.tables.outputs import Output
from vllm_relay.tables.question import Question, RequestOptions, placeholders_of
from vllm_relay.tables.semantic.record_lists import record_question
from vllm_relay.tables.sql.expressions import AGGREGATE, error_at, sql_of, text_of


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_number(value: Any, kinds: Any) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


_OBJECTS = ("sampling", "chat_template_kwargs", "extra_body")
_TEXT = ("a text in single quotes", lambda value: isinstance(value, str))
_TEXTS = ("a list of texts, as in ['a', 'b']", _are_texts)
_INTEGER = ("an integer", lambda value: _is_number(value, int))
_OBJECT = (
    "an object of constants, as in {top_p: 0.9}, or its JSON in single quotes",
    lambda value: isinstance(value, dict),
)
_IMAGES = (
    "fields with the bytes of images, ['a'], or what they hold, {a: 'path', b: 'url'}",
    lambda value: _are_texts(list(value.values()) if isinstance(value, dict) else value),
)
PARAMETERS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "choices": _TEXTS,
    "return": _TEXT,
    "schema": _TEXT,
    "max_tokens": _INTEGER,
    "temperature": ("a number", lambda value: _is_number(value, (int, float))),
    "seed": _INTEGER,
    "reorder": _TEXTS,
    "system_prompt": _TEXT,
    **dict.fromkeys(_OBJECTS, _OBJECT),
    "images": _IMAGES,
}
"""What a value is expected to be, by name."""
_DOTTED = re.compile(r"[^\W\d]\w*\.[^\W\d]\w*")
USAGE = "llm('text', {field, name: expression}, choices := ['Yes', 'No'])"


@dataclass(frozen=True)
class Field:
    """
    Attributes:
        name: in the prompt.
        expression: of its value.
    """

    name: str
    expression: exp.Expr


@dataclass(frozen=True)
class LlmCall:
    """
    Attributes:
        question: of every row.
        fields: in the order of the question's.
    """

    question: Question
    fields: tuple[Field, ...]


def read_call(
    node: exp.Anonymous, star_fields: Callable[[exp.Expr], list[Field]], images: ImageStore
) -> LlmCall:
    """
    Args:
        node: a call of llm(), or of llm_agg(), whose question is about a list of records with these
            fields.
        star_fields: the fields that ``*`` or ``t.*`` stands for.

    Raises:
        SqlError: it is not called as it should be.
    """
    question_of = record_question if node.name.lower() == AGGREGATE else Question
    text, fields_node, named = _arguments(node)
    fields = _fields(node, fields_node, star_fields)
    parameters = _parameters(node, named)
    output = _output(node, parameters)
    try:
        question = question_of(
            text,
            tuple(field.name for field in fields),
            output,
            max_tokens=parameters.get("max_tokens"),
            temperature=float(parameters.get("temperature", 0.0)),
            seed=parameters.get("seed"),
            set_fields=tuple(parameters.get("reorder", ())),
            request=RequestOptions(
                parameters.get("system_prompt", ""), *map(parameters.get, _OBJECTS)
            ),
            images=image_fields(parameters.get("images"), images),
        )
    except ValueError as error:
        raise error_at(node, str(error)) from None
    return LlmCall(question, tuple(fields))


def _arguments(node: exp.Anonymous) -> tuple[str, exp.Expr, list[exp.Expr]]:
    """The text, the fields and the parameters of a call."""
    positional = [part for part in node.expressions if not _is_named(part)]
    named = [part for part in node.expressions if _is_named(part)]
    if len(positional) not in (1, 2):
        raise error_at(
            node,
            f"{_named(node)} has {len(positional)} arguments without a name, expected two, as in "
            f"{USAGE}, or a text that names its fields in braces",
        )
    first = positional[0]
    text = text_of(first)
    if text is None:
        raise error_at(
            node,
            f"the first argument of {_named(node)} is {sql_of(first)}, expected a text in single "
            f"quotes: it is the same for every row; what differs by row belongs to the fields, as "
            f"in {USAGE}",
        )
    try:
        names = placeholders_of(text)
    except ValueError as error:
        raise error_at(node, str(error)) from None
    fields = positional[1] if len(positional) == 2 else _named_fields(node, names)
    return text, fields, named


def _named_fields(call: exp.Anonymous, names: list[str]) -> exp.Struct:
    """The columns that a question names in braces: ``{title}``, ``{t.title}`` or any other name."""
    if not names:
        raise error_at(
            call,
            f"{_named(call)} has 1 arguments without a name, and this text names no field in "
            f"braces: give fields, as in {USAGE}, or * for all columns",
        )
    fields = []
    for name in names:
        table, _, column = name.partition(".") if _DOTTED.fullmatch(name) else ("", "", name)
        value = exp.column(column, table=table or None, quoted=True)
        fields.append(exp.PropertyEQ(this=exp.to_identifier(name, quoted=True), expression=value))
    return exp.Struct(expressions=fields)


def _output(node: exp.Anonymous, parameters: dict[str, Any]) -> Output:
    try:
        return Output.of(
            parameters.get("return"), parameters.get("choices"), parameters.get("schema")
        )
    except ValueError as error:
        raise error_at(node, str(error)) from None


def _named(call: exp.Anonymous) -> str:
    """The function that is called, for messages."""
    return f"{call.name.lower()}()"


def _is_named(node: exp.Expr) -> bool:
    return isinstance(node, (exp.PropertyEQ, exp.Kwarg))


def is_star(node: exp.Expr) -> bool:
    """Whether it is ``*`` or ``t.*``."""
    return isinstance(node, exp.Star) or (
        isinstance(node, exp.Column) and isinstance(node.this, exp.Star)
    )


def _fields(
    call: exp.Anonymous, node: exp.Expr, star_fields: Callable[[exp.Expr], list[Field]]
) -> list[Field]:
    if is_star(node):
        fields = star_fields(node)
    elif isinstance(node, exp.Struct):
        fields = [_field(call, part) for part in node.expressions]
    else:
        raise error_at(
            call,
            f"the second argument of {_named(call)} is {sql_of(node)}, expected its fields: "
            f"{{a, b}}, {{name: expression}}, * or t.*",
        )
    seen: dict[str, str] = {}
    for field in fields:
        key = field.name.lower()
        if key in seen:
            raise error_at(
                call,
                f"two fields are named {seen[key]!r} and {field.name!r}, expected names that "
                f"differ by more than case: give one of them another name, as in "
                f"{{name: expression}}",
            )
        seen[key] = field.name
    return fields


def _field(call: exp.Anonymous, node: exp.Expr) -> Field:
    if isinstance(node, exp.PropertyEQ):
        return Field(node.this.name, node.expression)
    if isinstance(node, exp.Column) and not isinstance(node.this, exp.Star):
        return Field(node.name, node)
    if isinstance(node, exp.Dot):
        return Field(node.name, node)
    raise error_at(
        call,
        f"field {sql_of(node)} of {_named(call)} has no name: write {{name: {sql_of(node)}}}",
    )


def _parameters(call: exp.Anonymous, named: list[exp.Expr]) -> dict[str, Any]:
    # records are JSON, which holds no images
    is_aggregate = call.name.lower() == AGGREGATE
    known = [name for name in PARAMETERS if name != "images" or not is_aggregate]
    values: dict[str, Any] = {}
    for node in named:
        name = node.this.name.lower()
        if name not in known:
            raise error_at(
                call,
                f"{_named(call)} has no parameter {node.this.name!r}, expected some of {known}",
            )
        if name in values:
            raise error_at(call, f"parameter {name!r} of {_named(call)} is given twice")
        values[name] = _value(call, name, node.expression)
    return values


def _value(call: exp.Anonymous, name: str, node: exp.Expr) -> Any:
    expected, is_right = PARAMETERS[name]
    value = _constant(node)
    if name in _OBJECTS:
        value = _parsed(value)
    if not is_right(value):
        raise error_at(
            call, f"{name} := {sql_of(node)} given to {_named(call)}, expected {expected}"
        )
    return value


def _constant(node: exp.Expr) -> Any:
    """A literal as a value of Python; None if it is none."""
    text = text_of(node)
    if text is not None:
        return text
    if isinstance(node, exp.Literal):
        return _number(node.this)
    if isinstance(node, exp.Neg):
        value = _constant(node.this)
        return -value if isinstance(value, (int, float)) else None
    if isinstance(node, exp.Array):
        return [_constant(item) for item in node.expressions]
    if isinstance(node, exp.Boolean):
        return node.this
    if isinstance(node, exp.Struct):
        pairs = [each for each in node.expressions if isinstance(each, exp.PropertyEQ)]
        return {each.this.name: _constant(each.expression) for each in pairs}
    return None


def _parsed(value: Any) -> Any:
    """What a text is as JSON; None if it is none."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return None


def _number(text: str) -> int | float | None:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None
