# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest

from vllm_relay.tables.question import Question


def test_placeholders_are_the_fields_that_the_text_names() -> None:
    question = Question(
        'Does {review} fit {title}, as in {{"a": 1}} or {{}}? {review} {{', ("title", "review")
    )
    assert question.placeholders == ["review", "title"]
    assert question.prompt_text == ('Does {review} fit {title}, as in {"a": 1} or {}? {review} {')


@pytest.mark.parametrize("name", ["Wildlife Species", "Größe", "a.b", "2nd", 'say "x"', " "])
def test_any_name_stands_in_braces(name: str) -> None:
    question = Question(f"Is {{{name}}} a raptor? {{{{{name}}}}}", (name,))
    assert question.placeholders == [name]
    assert question.prompt_text == f"Is {{{name}}} a raptor? {{{name}}}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"text": " \n"}, "empty question"),
        ({"fields": ()}, "no fields"),
        ({"fields": ("a", "b", "a")}, r"\['a'\] given twice"),
        ({"text": "Is {b} good?"}, r"names \['b'\], expected some of its fields \['a'\]"),
        ({"text": "Is {b c.d} good?"}, r"names \['b c.d'\], .* written \{\{ and \}\}"),
        ({"text": "Is it {}?"}, r"names \[''\]"),
        ({"text": "Is {a good?"}, r"'\{' without its '\}' in 'Is \{a good\?': .* \{\{ and \}\}"),
        ({"text": "Is a} good?"}, r"'\}' without its '\{'"),
        ({"text": "Is {{a} good?"}, r"'\}' without its '\{'"),
        ({"text": "Is {a{a} good?"}, r"'\{' without its '\}'"),
        ({"text": "Is {a} like {b"}, r"'\{' without its '\}'"),
        ({"text": "Is \ud800 good?"}, "UTF-8"),
        ({"fields": ("a", "\udc00")}, "UTF-8"),
        ({"set_fields": ("b",)}, r"set_fields .* names \['b'\]"),
        ({"fields": "a"}, r"fields='a' given, expected a list of names: give \['a'\]"),
        ({"set_fields": "a"}, r"set_fields='a' given, expected a list of names: give \['a'\]"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": 2.1}, "temperature=2.1"),
        ({"temperature": float("nan")}, "temperature=nan"),
    ],
)
def test_bad_questions_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Question(**{"text": "Good?", "fields": ("a",), **arguments})
