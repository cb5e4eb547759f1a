# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest

from vllm_relay.tables.question import Question


def test_placeholders_are_the_fields_that_the_text_names() -> None:
    question = Question(
        'Does {review} fit {title}, as in {"a": 1} or {}? {review}', ("title", "review")
    )
    assert question.placeholders == ["review", "title"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"text": " \n"}, "empty question"),
        ({"fields": ()}, "no fields"),
        ({"fields": ("a", "b", "a")}, r"\['a'\] given twice"),
        ({"text": "Is {b} good?"}, r"names \['b'\]"),
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
