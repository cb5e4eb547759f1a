# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_relay.tables.outputs import AnswerError, Output, well_formed


def test_a_schema_without_a_type_means_json() -> None:
    output = Output.of(schema={"type": "object", "properties": {}})
    assert output == Output.of("json", schema='{"properties": {}, "type": "object"}')
    assert output.is_json
    assert output.constraint == {"json": '{"properties": {}, "type": "object"}'}
    assert Output.of() == Output("text")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"type": "date"}, "return type 'date'"),
        ({"choices": []}, "empty list of choices"),
        ({"choices": "yes"}, "expected a list of texts"),
        ({"choices": ["yes", "yes"]}, "expected different ones"),
        ({"choices": ["yes "]}, "without spaces around it"),
        ({"choices": ["\ud800"]}, "expected a text that can be UTF-8"),
        ({"choices": [1, 2]}, r"choices \[1, 2\] given, expected texts: give \['1', '2'\]"),
        ({"choices": ["a", 2]}, r"expected texts: give \['a', '2'\]"),
        ({"choices": ["1"], "type": "int"}, "choices are texts"),
        ({"schema": "{"}, "JSON schema"),
        ({"schema": "[]"}, "not an object"),
        ({"schema": {"a": object()}}, "JSON schema"),
        ({"schema": {}, "type": "int"}, "a schema goes with 'json'"),
        ({"type": "struct"}, "without a JSON schema: give one, or write the type"),
        ({"schema": {"type": "object"}, "type": "INTEGER[]"}, "give one of them"),
        ({"choices": ["a"], "type": "INTEGER[]"}, "choices are texts"),
    ],
)
def test_bad_outputs_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Output.of(**arguments)


def test_a_text_is_no_list_of_choices() -> None:
    text: Any = "ab"
    with pytest.raises(ValueError, match=r"choices='ab' given.* give \['ab'\]"):
        Output(choices=text)


@pytest.mark.parametrize("type", ["int", "float"])
@given(text=st.from_regex(r"-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,12})?", fullmatch=True))
def test_what_the_engine_may_answer_is_a_value(type: str, text: str) -> None:
    output = Output.of(type)
    if text.isascii() and re.fullmatch(output.constraint["regex"], text):
        value = output.parse(text)
        assert value == (int(text) if type == "int" else float(text))


@given(st.sampled_from(["int", "float", "bool", "json"]), st.text(max_size=8))
def test_any_answer_is_a_value_of_the_type_or_an_error(type: str, text: str) -> None:
    output = Output.of(type)
    try:
        value = output.parse(text)
    except AnswerError as error:
        assert type in str(error)
    else:
        expected = {"int": int, "float": float, "bool": bool, "json": str}[type]
        assert isinstance(value, expected)
        if type == "json":
            json.loads(str(value))


_CHOICES = st.lists(
    st.text("aé€😀 ", min_size=1, max_size=5).filter(lambda text: text == text.strip()),
    min_size=1,
    max_size=6,
    unique=True,
)


@given(_CHOICES, st.data())
def test_deciding_tokens_tell_the_choice(choices: list[str], data: st.DataObject) -> None:
    output = Output.of(choices=choices)
    for choice in choices:
        content = choice.encode()
        num_tokens = output.num_deciding_tokens
        assert num_tokens is not None
        # tokens of some bytes each
        ends = sorted(data.draw(st.sets(st.integers(1, len(content)))) | {len(content)})
        if num_tokens <= len(ends):  # or it ended by itself
            seen = content[: ends[num_tokens - 1]]
            for errors in ("ignore", "replace"):
                assert output.completed(seen.decode(errors=errors)) == choice


@pytest.mark.parametrize(
    ("output", "num_tokens"),
    [
        (Output.of(choices=["POSITIVE", "NEGATIVE", "NEUTRAL"]), 3),
        (Output.of(choices=["Yes", "No"]), 1),
        (Output.of(choices=["Yes"]), 1),
        (Output.of(choices=["No", "None"]), 3),
        (Output.of(choices=["x", "xé"]), 3),
        (Output.of("bool"), 1),
        (Output.of("int"), None),
        (Output.of("text"), None),
    ],
)
def test_how_many_tokens_tell_the_choice(output: Output, num_tokens: int | None) -> None:
    assert output.num_deciding_tokens == num_tokens


def test_a_beginning_is_completed_where_one_text_has_it() -> None:
    output = Output.of(choices=["No", "None", "Yes"])
    assert output.completed("No") is None
    assert output.completed("") is None
    assert output.completed("Maybe") is None
    assert output.completed("Non") == "None"
    assert output.completed(" Y\ufffd") == "Yes"
    assert Output.of("bool").completed("f") == "false"
    assert Output.of("int").completed("1") is None


@given(st.text(alphabet=st.characters(), max_size=10))
def test_texts_become_well_formed_and_others_stay(text: str) -> None:
    mended = well_formed(text)
    mended.encode()
    try:
        text.encode()
    except UnicodeEncodeError:
        assert mended != text
    else:
        assert mended == text
