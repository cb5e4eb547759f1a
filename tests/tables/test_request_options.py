# SPDX-License-Identifier: Apache-2.0
"""System prompts, sampling and template variables, wherever a question is asked."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from tests.tables.engines.server.fake_server import OTHER_MODEL, answer, chat_answer, fake_server
from tests.tables.engines.server.test_engine import engine_for, prompts
from vllm_relay.tables import JobOptions, connect, llm_map
from vllm_relay.tables.engines.server.engine import ServerEngine
from vllm_relay.tables.jobs.asking import ask
from vllm_relay.tables.jobs.checkpoint import Keys
from vllm_relay.tables.jobs.prompts.format import PromptFormat, PromptTemplate
from vllm_relay.tables.question import Question, RequestOptions

TOLD = RequestOptions("Be brief.", {"top_p": 0.9}, {"enable_thinking": False}, {"cache_salt": "a"})
TABLE = pa.table({"name": ["ab"]})


@pytest.mark.parametrize("name", ["sampling", "extra_body"])
@pytest.mark.parametrize("key", ["n", "stream", "messages", "prompt", "max_tokens", "temperature"])
def test_what_follows_from_the_question_is_refused(name: str, key: str) -> None:
    given: dict[str, Any] = {name: {key: 1}}
    with pytest.raises(ValueError, match=f"{name} with '{key}' given"):
        RequestOptions(**given)


@pytest.mark.parametrize("value", [["top_p"], {"top_p": {1, 2}}, {"top_p": float("nan")}, "x"])
def test_what_is_no_json_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="sampling=.* given, expected an object of JSON"):
        RequestOptions(sampling=value)


def test_a_question_wins_over_defaults() -> None:
    own = RequestOptions("Shout.", {"top_p": 0.5, "top_k": 3})
    assert own.over(TOLD) == RequestOptions(
        "Shout.", {"top_p": 0.5, "top_k": 3}, {"enable_thinking": False}, {"cache_salt": "a"}
    )
    assert RequestOptions().over(TOLD) == TOLD


def test_messages_have_them() -> None:
    with fake_server(lambda body: chat_answer(), OTHER_MODEL) as server:
        question = Question("?", ("a",), max_tokens=5, request=TOLD)
        list(ServerEngine(server.url).generate(prompts(1), question))
        assert server.bodies == [
            {
                "model": "gpt",
                "messages": [
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": "row 0"},
                ],
                "max_tokens": 5,
                "temperature": 0.0,
                "top_p": 0.9,
                "chat_template_kwargs": {"enable_thinking": False},
                "cache_salt": "a",
            }
        ]


def test_tokens_have_their_template_here() -> None:
    with fake_server(lambda body: answer()) as server:
        list(engine_for(server.url).generate(prompts(1), Question("?", ("a",), request=TOLD)))
        body = server.bodies[0]
        assert (body["top_p"], body["cache_salt"]) == (0.9, "a")
        assert "chat_template_kwargs" not in body


def test_tables_in_memory_are_asked_with_the_options_of_all_questions() -> None:
    with fake_server(lambda body: chat_answer(), OTHER_MODEL) as server:
        rows = pa.table({"name": ['"ab"']})
        ask(rows, Question("?", ("name",)), ServerEngine(server.url), JobOptions(request=TOLD))
        assert (server.bodies[0]["top_p"], server.bodies[0]["cache_salt"]) == (0.9, "a")
        assert server.bodies[0]["messages"][0] == {"role": "system", "content": "Be brief."}


class TurnsTokenizer:
    """A token per character."""

    chat_template = "turns"

    def apply_chat_template(self, messages: Any, **variables: Any) -> str:
        assert variables.pop("add_generation_prompt") and not variables.pop("tokenize")
        if variables.pop("refuses", False):
            raise TypeError("no such variable")
        turns = "".join(f"<{each['role']}>{each['content']}" for each in messages)
        return f"{turns}<assistant>{variables or ''}"

    def __call__(self, texts: list[str], **_: Any) -> dict[str, Any]:
        return {"input_ids": [[ord(each) for each in text] for text in texts]}


def test_the_template_of_a_tokenizer_has_them() -> None:
    question = Question("Good?", ("a",), request=TOLD)
    made = PromptFormat(question, TurnsTokenizer(), PromptTemplate())
    [tokens] = made.token_ids(["row"])
    text = "".join(map(chr, tokens))
    assert text == "<system>Be brief.<user>row<assistant>{'enable_thinking': False}"


def test_a_template_that_refuses_is_told() -> None:
    request = RequestOptions(chat_template_kwargs={"refuses": True})
    with pytest.raises(ValueError, match="chat template refuses its messages: no such variable"):
        PromptFormat(Question("?", ("a",), request=request), TurnsTokenizer(), PromptTemplate())


def test_answers_are_kept_apart() -> None:
    def key(request: RequestOptions) -> bytes:
        question = Question("?", ("a",), request=request)
        return Keys("model", question, PromptTemplate(), False).of(["1"])

    assert len({key(RequestOptions()), key(TOLD), key(RequestOptions("Be brief."))}) == 3
    assert key(RequestOptions(sampling={"top_k": 1, "top_p": 2})) == key(
        RequestOptions(sampling={"top_p": 2, "top_k": 1})
    )


@pytest.mark.parametrize("as_text", [False, True])
def test_in_sql(as_text: bool) -> None:
    sampling = """'{"top_p": 0.9}'""" if as_text else "{top_p: 0.9}"
    statement = (
        "SELECT llm('Good?', {name}, system_prompt := 'Be brief.', "
        f"sampling := {sampling}, extra_body := {{'cache_salt': 'a'}}) AS a FROM t"
    )
    defaults = RequestOptions("Shout.", None, {"enable_thinking": False})
    with fake_server(lambda body: chat_answer(), OTHER_MODEL) as server:
        options = JobOptions(request=defaults, show_progress=False)
        with connect(engine=server.url, options=options, tables={"t": TABLE}) as database:
            assert database.sql(statement).fetchall() == [("yes",)]
        [body] = server.bodies
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["top_p"], body["cache_salt"]) == (0.9, "a")
    assert body["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize("given", ["'x'", "3", "name", "['a']"])
def test_in_sql_they_are_constants(given: str) -> None:
    with (
        fake_server(model=OTHER_MODEL) as server,
        connect(engine=server.url, tables={"t": TABLE}) as database,
        pytest.raises(ValueError, match="sampling := .* expected an object of constants"),
    ):
        database.sql(f"SELECT llm('?', {{name}}, sampling := {given}) FROM t")


def test_in_llm_map() -> None:
    with fake_server(lambda body: chat_answer(), OTHER_MODEL) as server:
        llm_map(TABLE, "Good?", engine=server.url, system_prompt="Be brief.",
                sampling={"top_p": 0.9}, extra_body={"cache_salt": "a"},
                chat_template_kwargs={"enable_thinking": False})  # fmt: skip
        [body] = server.bodies
    assert body["messages"][0]["content"] == "Be brief."
    assert (body["top_p"], body["cache_salt"]) == (0.9, "a")


def test_a_model_in_this_process_has_vllms_parameters() -> None:
    pytest.importorskip("vllm")
    from vllm_relay.tables.engines.in_process import sampling_params

    request = RequestOptions(sampling={"top_p": 0.9}, extra_body={"vllm_xargs": {"tenant": "a"}})
    params = sampling_params(Question("?", ("a",), max_tokens=7, temperature=0.5, request=request))
    assert (params.top_p, params.extra_args, params.max_tokens) == (0.9, {"tenant": "a"}, 7)
    request = RequestOptions(extra_body={"user": "me"})
    with pytest.raises(ValueError, match=r"\['user'\] given, which a model in this process does"):
        sampling_params(Question("?", ("a",), request=request))
