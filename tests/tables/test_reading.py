# SPDX-License-Identifier: Apache-2.0
"""What models put around answers, and what is no certain answer."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_relay.tables.outputs import AnswerError, Output, bare, chosen

YES_NO = Output(choices=("Yes", "No"))


@pytest.mark.parametrize(
    ("output", "text", "value"),
    [
        (YES_NO, "NO ", "No"),
        (YES_NO, "yes.", "Yes"),
        (YES_NO, '"Yes"', "Yes"),
        (YES_NO, "**No**", "No"),
        (YES_NO, "`no`.", "No"),
        (YES_NO, "```\nYes\n```", "Yes"),
        (YES_NO, "\u201cYes.\u201d", "Yes"),
        (Output("bool"), "NO ", False),
        (Output("bool"), "Yes.", True),
        (Output("bool"), "```json\ntrue\n```", True),
        (Output("int"), "```json 0```", 0),
        (Output("int"), "```json\n-3\n```", -3),
        (Output("int"), "7.", 7),
        (Output("int"), '"7"', 7),
        (Output("float"), "**3.5**.", 3.5),
        (Output("json"), '```json\n{"a": 1}\n```', '{"a": 1}'),
        (Output("text"), ' "quoted." ', '"quoted."'),
    ],
)
def test_what_is_certain(output: Output, text: str, value: Any) -> None:
    assert output.parse(text) == value
    assert type(output.parse(text)) is type(value)


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (YES_NO, "Yes, but no"),
        (YES_NO, "Yes or No"),
        (YES_NO, "Y"),
        (YES_NO, ""),
        (YES_NO, "..."),
        (YES_NO, "```Yes``` ```No```"),
        (YES_NO, "not No"),
        (Output(choices=("us", "US")), "Us"),
        (Output("bool"), "maybe"),
        (Output("bool"), "not true"),
        (Output("int"), "1,000"),
        (Output("int"), "about 3"),
        (Output("int"), "3 or 4"),
        (Output("int"), "3.5"),
        (Output("float"), "1,5"),
        (Output("float"), "5%"),
        (Output("json"), 'Here it is: {"a": 1}'),
        (Output("json"), "```json\n{}\n```\n```json\n{}\n```"),
    ],
)
def test_what_is_not(output: Output, text: str) -> None:
    with pytest.raises(AnswerError):
        output.parse(text)


def test_case_counts_where_choices_differ_by_it() -> None:
    choices = ("us", "US", "a.", "A")
    assert [chosen(each, choices) for each in ("us", " US ", '"us"')] == ["us", "US", "us"]
    assert [chosen(each, choices) for each in ("a.", "A", "a")] == ["a.", "A", None]


@given(st.lists(st.text(min_size=1).filter(lambda each: each == each.strip()), min_size=1))
def test_a_choice_as_it_is_is_that_choice(choices: list[str]) -> None:
    for each in choices:
        assert chosen(each, choices) == each
        assert chosen(f" {each}\n", choices) == each


@given(st.text())
def test_of_a_bare_text_nothing_is_left_out(text: str) -> None:
    assert bare(bare(text)) == bare(text)
