# SPDX-License-Identifier: Apache-2.0
"""Prompts that a server answers, and what the engine knows of the server."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psutil
import pytest

from tests.tables.engines.server.fake_server import (
    OTHER_MODEL,
    VLLM_MODEL,
    Reply,
    answer,
    chat_answer,
    failure,
    fake_server,
)
from vllm_relay.tables.engines.addresses import ServerKey
from vllm_relay.tables.engines.base import Completion, EngineError, Prompt
from vllm_relay.tables.engines.server import admission
from vllm_relay.tables.engines.server.engine import ServerEngine
from vllm_relay.tables.engines.server.http import HttpClient, ServerAddress
from vllm_relay.tables.ordering.cached_tokens import BlockCache
from vllm_relay.tables.outputs import Output
from vllm_relay.tables.question import Question

QUESTION = Question("Is it good?", ("review",), max_tokens=5)

CACHE_LABELS = 'block_size="16",enable_prefix_caching="True",num_gpu_blocks="%s",engine="%d"'
CACHE_METRICS = f"""# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{{CACHE_LABELS % ("%s", 0)}}} 1.0
vllm:cache_config_info{{{CACHE_LABELS % (90, 1)}}} 1.0
vllm:num_requests_running{{engine="0",model_name="tiny"}} 0.0
"""


class WordTokenizer:
    """A token per character."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [ord(each) for each in text]


def prompts(num: int) -> Iterator[Prompt]:
    """Prompt i has the token i + 1."""
    for number in range(num):
        yield Prompt(number, f"row {number}", [number + 1])


def engine_threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name == "relay-server-engine"]


def engine_for(url: str, **options: Any) -> ServerEngine:
    return ServerEngine(url, **{"tokenizer": WordTokenizer(), **options})


def test_tokens_are_sent_to_vllm() -> None:
    with fake_server() as server:
        engine = engine_for(server.url + "/v1/", api_key="secret")
        assert (engine.mode, engine.max_model_len, engine.cache) == ("completions", 512, None)
        assert engine.identity == "tiny [org/tiny] completions"
        question = Question("?", ("a",), Output(choices=("yes", "no")), 5, 0.5, 7)
        [completion] = engine.generate([Prompt(3, "message", [5, 6])], question)
        assert completion == Completion(3, "yes", "", 3, 0, 2)
        assert server.headers["authorization"] == "Bearer secret"
        assert server.bodies == [
            {
                "model": "tiny",
                "prompt": [5, 6],
                "max_tokens": 5,
                "temperature": 0.5,
                "seed": 7,
                "structured_outputs": {"choice": ["yes", "no"]},
                "top_p": 1.0,
                "top_k": 0,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
            }
        ]
        engine.close()


def test_messages_are_sent_to_others() -> None:
    with fake_server(lambda body: chat_answer(), OTHER_MODEL) as server:
        engine = ServerEngine(server.url)
        assert (engine.mode, engine.max_model_len, engine.cache) == ("chat", None, None)
        assert (engine.identity, engine.tokenizer) == ("gpt chat", None)
        [completion] = engine.generate([Prompt(0, "message", [])], QUESTION)
        assert completion == Completion(0, "yes")
        assert server.bodies == [
            {
                "model": "gpt",
                "messages": [{"role": "user", "content": "message"}],
                "max_tokens": 5,
                "temperature": 0.0,
            }
        ]


def test_tokens_are_sent_to_others_that_are_said_to_take_them() -> None:
    with fake_server(model=OTHER_MODEL) as server:
        engine = engine_for(server.url, mode="completions")
        list(engine.generate(prompts(1), Question("?", ("a",), Output("bool"), 5)))
        assert server.bodies == [
            {"model": "gpt", "prompt": [1], "max_tokens": 5, "temperature": 0.0}
        ]
        with pytest.raises(ValueError, match="but the server does not say where its tokenizer is"):
            ServerEngine(server.url, mode="completions")


def wrapped(schema: dict[str, Any]) -> dict[str, Any]:
    """The answer stands in an object, as servers take no other schemas."""
    whole = {
        "type": "object",
        "properties": {"answer": schema},
        "required": ["answer"],
        "additionalProperties": False,
    }
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": whole}}


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (Output(), None),
        (Output("int"), wrapped({"type": "integer"})),
        (Output("float"), wrapped({"type": "number"})),
        (Output("bool"), wrapped({"type": "boolean"})),
        (Output(choices=("a", "b")), wrapped({"type": "string", "enum": ["a", "b"]})),
        (Output("json"), {"type": "json_object"}),
        (Output.of(schema={"type": "array"}), wrapped({"type": "array"})),
        (
            Output.of(schema={"type": "object"}),
            {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": {"type": "object"}},
            },
        ),
    ],
    ids=["text", "int", "float", "bool", "choices", "json", "array", "schema"],
)
def test_constraints_that_other_servers_know(output: Output, expected: Any) -> None:
    with fake_server(lambda body: chat_answer(), OTHER_MODEL) as server:
        list(ServerEngine(server.url).generate(prompts(1), Question("?", ("a",), output)))
        assert server.bodies[0].get("response_format") == expected


def test_one_of_several_models() -> None:
    with fake_server(model=OTHER_MODEL) as server:
        adapter = {"id": "lora", "owned_by": "vllm", "root": "org/lora", "parent": "tiny"}
        server.models["data"] = [VLLM_MODEL, adapter]
        with pytest.raises(ValueError, match=r"no model given, .*\['tiny', 'lora'\].*give one"):
            engine_for(server.url)
        with pytest.raises(ValueError, match=r"'big' given, expected one .*\['tiny', 'lora'\]"):
            engine_for(server.url, model="big")
        engine = engine_for(server.url, model="lora")
        assert (engine.identity, engine.max_model_len) == (
            "lora [org/lora] [org/tiny] completions",
            512,
        )


@pytest.mark.parametrize(
    ("num_gpu_blocks", "expected"),
    [("50", BlockCache(16, 49)), ("100", BlockCache(16, 89)), ("None", None), ("0", None)],
)
def test_the_cache_of_the_smallest_engine(num_gpu_blocks: str, expected: Any) -> None:
    with fake_server() as server:
        server.metrics = CACHE_METRICS % num_gpu_blocks
        assert engine_for(server.url).cache == expected


@pytest.mark.parametrize("metrics", ["", "{{{", CACHE_METRICS.replace("True", "False") % 9])
def test_no_cache(metrics: str) -> None:
    with fake_server() as server:
        server.metrics = metrics
        assert engine_for(server.url).cache is None


def test_prompts_that_come_late_are_taken_while_others_run() -> None:
    class Late:
        """The second prompt comes when the first runs, after the iterator has ended."""

        def __init__(self) -> None:
            self.num_given = 0

        def __iter__(self) -> Late:
            return self

        def __next__(self) -> Prompt:
            if self.num_given == 2 or (self.num_given == 1 and not server.num_running):
                raise StopIteration
            self.num_given += 1
            return Prompt(self.num_given, "", [self.num_given])

    def behaviour(body: dict[str, Any]) -> Reply:
        if body["prompt"] == [2]:
            server._loop.call_soon(second_came.set)
        return replace(answer(), held_until=second_came)

    second_came = asyncio.Event()
    with fake_server(behaviour) as server:
        found = {each.number for each in engine_for(server.url).generate(Late(), QUESTION)}
        assert found == {1, 2}


def test_without_its_tokenizer_vllm_is_sent_messages(caplog: pytest.LogCaptureFixture) -> None:
    with fake_server(lambda body: chat_answer()) as server:
        server.models["data"][0] = VLLM_MODEL | {"root": "/there/is/no/model"}
        engine = ServerEngine(server.url)
        assert (engine.mode, engine.tokenizer) == ("chat", None)
        assert "/there/is/no/model" in caplog.text and "Messages are sent" in caplog.text
        list(engine.generate(prompts(1), Question("?", ("a",), Output("bool"))))
        assert server.bodies[0]["structured_outputs"] == {"choice": ["true", "false"]}
        with pytest.raises(ValueError, match="mode='completions' needs the model's tokenizer"):
            ServerEngine(server.url, mode="completions")
        with pytest.raises(ValueError, match="tokenizer='/not/here' given: no tokenizer can be"):
            ServerEngine(server.url, tokenizer="/not/here")


def test_the_tokenizer_of_another_model(caplog: pytest.LogCaptureFixture) -> None:
    with fake_server() as server:
        server.token_ids = [1, 2, 3]
        with pytest.raises(ValueError, match="other tokens than the server's model 'tiny'"):
            engine_for(server.url)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "fast"}, "mode='fast' given, expected one of"),
        ({"max_running": 0}, "max_running=0 given, expected at least 1"),
        ({"timeout_s": 0}, "timeout_s=0 given"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServerEngine("http://127.0.0.1:9", **options)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", "http://host/?a=b"])
def test_bad_addresses(url: str) -> None:
    with pytest.raises(ValueError, match="expected an address such as http://localhost:8000/v1"):
        ServerEngine(url)


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (failure(401, "Unauthorized"), "lets nobody in without an api_key: HTTP 401: Una"),
        (failure(404, "Not Found"), "does not answer as expected: HTTP 404: Not Found"),
        (failure(307, Location="https://elsewhere"), "redirects to https://elsewhere"),
        (Reply(b"<html>"), "the reply is no JSON: '<html>'"),
        (Reply([]), "expected a list of models"),
        (Reply(drops=True), "the connection broke"),
    ],
    ids=["key", "path", "redirect", "page", "list", "drop"],
)
def test_a_server_that_does_not_say_what_it_has(page: Reply, message: str) -> None:
    with fake_server() as server:
        server.models = page
        with pytest.raises(EngineError, match=message):
            engine_for(server.url)


def test_the_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "near")
    assert ServerAddress.of("http://far/v1", ServerKey()).proxy == "http://proxy:3128"
    assert ServerAddress.of("http://near/v1", ServerKey()).proxy is None
    # what is sent to this machine does not leave it
    assert ServerAddress.of("http://127.0.0.1:8000", ServerKey()).proxy is None


def test_no_server() -> None:
    with fake_server() as server:
        url = server.url
    with pytest.raises(EngineError, match="no connection: .*give the address of a server"):
        engine_for(url)


def test_tokens_are_needed() -> None:
    with (
        fake_server() as server,
        pytest.raises(ValueError, match="prompt 4 has no token ids.*mode='chat'"),
    ):
        list(engine_for(server.url).generate([Prompt(4, "message", [])], QUESTION))
    assert not engine_threads()


def test_no_prompts() -> None:
    with fake_server() as server:
        assert list(engine_for(server.url).generate([], QUESTION)) == []
        assert not engine_threads()


def test_one_after_the_other_in_their_order() -> None:
    with fake_server(lambda body: answer(str(body["prompt"][0]))) as server:
        completions = list(engine_for(server.url, max_running=1).generate(prompts(50), QUESTION))
        assert [each.number for each in completions] == list(range(50))
        assert [each.text for each in completions] == [str(i + 1) for i in range(50)]
        assert server.prompts == [[i + 1] for i in range(50)]
        assert server.most_running == 1


def test_prompts_are_sent_in_their_order_whatever_their_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that are taken before the first answer included."""
    given = list(prompts(300))
    numbers = random.Random(0).sample(range(300), 300)
    shuffled = [replace(prompt, number=n) for prompt, n in zip(given, numbers, strict=True)]
    sent: list[int] = []
    post_json = HttpClient.post_json

    async def noted(http: HttpClient, path: str, body: dict[str, Any]) -> Any:
        sent.append(body["prompt"][0] - 1)
        return await post_json(http, path, body)

    with fake_server() as server:
        engine = engine_for(server.url)
        monkeypatch.setattr(HttpClient, "post_json", noted)
        list(engine.generate(shuffled, QUESTION))
    # connections that are opened at once may still overtake each other
    assert sent == list(range(300))


def test_completions_come_as_they_are_ready() -> None:
    """The first prompt is answered when all others have been."""
    num_answered = 0

    def behaviour(body: dict[str, Any]) -> Reply:
        nonlocal num_answered
        if body["prompt"] == [1] and num_answered < 20:
            return failure(503)
        num_answered += 1
        return answer()

    with fake_server(behaviour) as server:
        engine = engine_for(server.url, max_running=2)
        completions = list(engine.generate(prompts(21), QUESTION))
        assert sorted(each.number for each in completions) == list(range(21))
        assert completions[-1].number == 0


def test_thousands_of_prompts() -> None:
    with fake_server() as server:
        completions = list(engine_for(server.url).generate(prompts(5000), QUESTION))
        assert sorted(each.number for each in completions) == list(range(5000))
        assert not any(each.error for each in completions)
        assert server.most_running <= 64
        order = [prompt[0] - 1 for prompt in server.prompts]
        assert max(abs(number - place) for place, number in enumerate(order)) < 2 * 64
        server.wait_until_left()


def test_prompts_are_taken_when_there_is_room() -> None:
    """Nothing is answered until ten are taken: eight that run and two more."""
    num_taken = most_ahead = 0

    def counted() -> Iterator[Prompt]:
        nonlocal num_taken
        for prompt in prompts(1000):
            num_taken += 1
            yield prompt

    def behaviour(body: dict[str, Any]) -> Reply:
        return answer() if num_taken >= 10 else failure(503)

    with fake_server(behaviour) as server:
        completions = engine_for(server.url, max_running=8).generate(counted(), QUESTION)
        for num_given, _ in enumerate(completions):
            most_ahead = max(most_ahead, num_taken - num_given)
    assert (num_taken, most_ahead) == (1000, 10)


def test_no_more_run_than_asked_for() -> None:
    with fake_server(lambda body: replace(answer(), delay_s=0.005)) as server:
        completions = engine_for(server.url, max_running=8).generate(prompts(200), QUESTION)
        assert len(list(completions)) == 200
        assert server.most_running <= 8


def test_closing_aborts_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_FIRST_S", 0.01)
    all_run = asyncio.Event()

    def behaviour(body: dict[str, Any]) -> Reply:
        if len(server.bodies) == 16:
            all_run.set()
        return replace(answer(), held_until=all_run) if body["prompt"] == [1] else Reply(hangs=True)

    with fake_server(behaviour) as server:
        threads = set(threading.enumerate())
        # names are looked up in further threads
        url = server.url.replace("127.0.0.1", "localhost")
        completions = engine_for(url, max_running=16).generate(prompts(100), QUESTION)
        assert next(completions).number == 0
        assert len(engine_threads()) == 1
        server.wait_until_running(16)
        completions.close()
        assert set(threading.enumerate()) <= threads
        sockets = psutil.Process().net_connections()
        assert not [each for each in sockets if each.raddr and each.raddr.port == server.port]
        server.wait_until_left()
        assert (len(server.bodies), server.num_abandoned) == (17, 16)


@pytest.fixture
def interrupts() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where the tests were started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_while_nothing_arrives(interrupts: None) -> None:
    def behaviour(body: dict[str, Any]) -> Reply:
        if body["prompt"] == [4]:
            os.kill(os.getpid(), signal.SIGINT)
        return Reply(hangs=True)

    with fake_server(behaviour) as server:
        completions = engine_for(server.url).generate(prompts(4), QUESTION)
        with pytest.raises(KeyboardInterrupt):
            next(completions)
        assert not engine_threads()
        server.wait_until_left()


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_errors_of_the_prompts_abort_what_runs(error: type[BaseException]) -> None:
    def failing() -> Iterator[Prompt]:
        yield from prompts(3)
        raise error

    with fake_server(lambda body: Reply(hangs=True)) as server:
        with pytest.raises(error):
            list(engine_for(server.url).generate(failing(), QUESTION))
        assert not engine_threads()
        server.wait_until_left()


def test_two_questions_at_once() -> None:
    with fake_server() as server:
        engine = engine_for(server.url, max_running=3)
        both = zip(
            engine.generate(prompts(40), QUESTION),
            engine.generate(prompts(40), QUESTION),
            strict=True,
        )
        assert len(list(both)) == 40
        assert not engine_threads()


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (answer("ye", finish_reason="length"), Completion(0, "ye", "", 3, 0, 2, True)),
        (
            Reply(
                {
                    "choices": [{"text": "a", "finish_reason": "stop"}],
                    "usage": {
                        "prompt_tokens": 40,
                        "completion_tokens": 1,
                        "prompt_tokens_details": {"cached_tokens": 32},
                    },
                }
            ),
            Completion(0, "a", "", 40, 32, 1),
        ),
        (
            answer("", finish_reason="content_filter"),
            Completion(0, "", "the server's content filter held the answer back", 3, 0, 2),
        ),
    ],
    ids=["cut", "cached", "filtered"],
)
def test_what_replies_say(reply: Reply, expected: Completion) -> None:
    with fake_server(lambda body: reply) as server:
        assert list(engine_for(server.url).generate(prompts(1), QUESTION)) == [expected]


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (chat_answer(None, refusal="I will not."), "the model refused: I will not."),
        (chat_answer(None), "the reply has no text, finish_reason is 'stop'"),
    ],
    ids=["refusal", "null"],
)
def test_chat_replies_without_an_answer(reply: Reply, error: str) -> None:
    with fake_server(lambda body: reply, OTHER_MODEL) as server:
        [completion] = ServerEngine(server.url).generate(prompts(1), QUESTION)
        assert completion.error == error
