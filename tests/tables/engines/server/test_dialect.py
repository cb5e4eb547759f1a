# SPDX-License-Identifier: Apache-2.0
"""What servers take is learned from what they refuse."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.tables.engines.server.fake_server import (
    OTHER_MODEL,
    Reply,
    chat_answer,
    failure,
    fake_server,
)
from tests.tables.engines.server.test_engine import QUESTION, prompts
from vllm_relay.tables.engines.base import EngineError
from vllm_relay.tables.engines.server.dialect import Dialect
from vllm_relay.tables.engines.server.engine import ServerEngine
from vllm_relay.tables.outputs import Output
from vllm_relay.tables.question import Question

OF_OPENAI = (
    "Unsupported parameter: 'max_tokens' is not supported with this model. Use "
    "'max_completion_tokens' instead."
)
OF_VLLM = (
    "'max_tokens' or 'max_completion_tokens' is too large: 5. This model's maximum context length "
    "is 512 tokens and your request has 510 input tokens"
)
OF_MISTRAL = "[{'type': 'extra_forbidden', 'loc': ('body', 'max_tokens'), 'msg': 'Extra inputs'}]"


@pytest.mark.parametrize(
    "words", [OF_OPENAI, OF_MISTRAL, "Unrecognized request argument: max_tokens"]
)
def test_the_limit_has_the_name_that_the_server_takes(words: str) -> None:
    def behaviour(body: dict[str, Any]) -> Reply:
        return failure(400, words) if "max_tokens" in body else chat_answer()

    with fake_server(behaviour, OTHER_MODEL) as server:
        engine = ServerEngine(server.url, max_running=8)
        for _ in range(2):
            completions = list(engine.generate(prompts(50), QUESTION))
            assert len(completions) == 50 and not any(each.error for each in completions)
        assert server.bodies[-1]["max_completion_tokens"] == QUESTION.max_tokens
        # the second time it is known
        assert len(server.bodies) <= 100 + 4


def test_a_prompt_that_is_too_long_says_nothing_of_the_limits_name() -> None:
    def behaviour(body: dict[str, Any]) -> Reply:
        is_long = body["messages"][0]["content"] == "row 0"
        return failure(400, OF_VLLM) if is_long else chat_answer()

    with fake_server(behaviour, OTHER_MODEL) as server:
        completions = list(ServerEngine(server.url).generate(prompts(9), QUESTION))
        assert [each.number for each in completions if each.error] == [0]
        assert all("max_completion_tokens" not in body for body in server.bodies)


SCHEMA = Output.of(schema={"type": "object", "properties": {"a": {"type": "integer"}}})
CHOICES = Output(choices=("yes", "no"))


@pytest.mark.parametrize(
    ("output", "kinds", "expected"),
    [
        (SCHEMA, (), ["json_schema"]),
        (SCHEMA, ("json_schema",), ["json_schema", "json_object"]),
        (SCHEMA, ("json_schema", "json_object"), ["json_schema", "json_object", None]),
        (CHOICES, ("json_schema", "json_object"), ["json_schema", None]),
        (Output("json"), ("json_object",), ["json_object", None]),
        (Output("text"), ("json_schema", "json_object"), [None]),
    ],
)
def test_formats_that_a_server_lacks(
    output: Output, kinds: tuple[str, ...], expected: list[str | None]
) -> None:
    def kind_of(body: dict[str, Any]) -> str | None:
        return (body.get("response_format") or {}).get("type")

    def behaviour(body: dict[str, Any]) -> Reply:
        if kind_of(body) in kinds:
            return failure(400, f"This response_format type is unavailable now: {kind_of(body)}")
        return chat_answer('{"a": 1}' if output.type == "json" else "yes")

    with fake_server(behaviour, OTHER_MODEL) as server:
        question = Question("?", ("a",), output)
        completions = list(ServerEngine(server.url).generate(prompts(40), question))
        assert len(completions) == 40 and not any(each.error for each in completions)
        assert list(dict.fromkeys(map(kind_of, server.bodies))) == expected
        assert len(server.bodies) <= 40 + 4 * (len(expected) - 1)


def test_what_worked_is_not_given_up() -> None:
    def behaviour(body: dict[str, Any]) -> Reply:
        is_odd = body["messages"][0]["content"] == "row 5"
        return failure(400, "the schema in this prompt is odd") if is_odd else chat_answer("yes")

    with fake_server(behaviour, OTHER_MODEL) as server:
        engine = ServerEngine(server.url, max_running=1)
        completions = list(engine.generate(prompts(9), Question("?", ("a",), CHOICES)))
        assert [each.number for each in completions if each.error] == [5]
        assert all("response_format" in body for body in server.bodies)


@pytest.mark.parametrize("words", ["'temperature' does not support 0 with this model", "no seed"])
def test_what_would_change_answers_is_not_left_out(words: str) -> None:
    with fake_server(lambda body: failure(400, words), OTHER_MODEL) as server:
        with pytest.raises(EngineError, match=f"refuses every prompt.*{words}"):
            list(ServerEngine(server.url).generate(prompts(90), QUESTION))
        assert len(server.bodies) <= 5


@pytest.mark.parametrize(
    ("output", "value", "text"),
    [
        (CHOICES, "yes", "yes"),
        (Output("bool"), True, "true"),
        (Output("int"), 12345678901234567, "12345678901234567"),
        (Output("float"), 0.1, "0.1"),
        (Output.of(schema={"type": "array"}), ["ä", 1], '["ä", 1]'),
        (Output.of("VARCHAR[]"), ["ä"], '["ä"]'),
    ],
)
def test_answers_are_taken_out_of_their_objects(output: Output, value: Any, text: str) -> None:
    dialect = Dialect()
    assert dialect.unwrapped(json.dumps({"answer": value}), output) == text
    # what the server did not put into one is read as it is
    for other in (text, '{"answer": 1, "b": 2}', '{"other": 1}', '{"answer": '):
        assert dialect.unwrapped(other, output) == other
    assert output.parse(text) is not None


def test_objects_that_were_asked_for_stay() -> None:
    text = '{"answer": 1}'
    struct = Output.of("STRUCT(answer INTEGER)")
    for output in (Output("json"), SCHEMA, struct, Output("text")):
        assert Dialect().unwrapped(text, output) == text


def test_definitions_stay_where_references_find_them() -> None:
    schema = {
        "type": "array",
        "items": {"$ref": "#/$defs/Part"},
        "$defs": {"Part": {"enum": ["a"]}},
    }
    told = Dialect().response_format(Output.of("struct", schema=schema))
    assert told is not None
    sent = told["json_schema"]["schema"]
    validator = Draft202012Validator(sent)
    assert validator.is_valid({"answer": ["a"]})
    assert not validator.is_valid({"answer": ["b"]})
