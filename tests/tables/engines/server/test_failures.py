# SPDX-License-Identifier: Apache-2.0
"""Servers that fail, for one prompt or for all."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from random import Random
from typing import Any

import pytest

from tests.tables.engines.server.fake_server import (
    VLLM_MODEL,
    FakeServer,
    Reply,
    answer,
    failure,
    fake_server,
)
from tests.tables.engines.server.test_engine import QUESTION, engine_for, engine_threads, prompts
from vllm_relay.tables.engines.base import EngineError
from vllm_relay.tables.engines.server.engine import ServerEngine
from vllm_relay.tables.engines.server.http import RetryPolicy, retry_after_s

AT_ONCE = RetryPolicy(first_delay_s=0.001, max_delay_s=0.001)


def hasty(server: FakeServer, **options: Any) -> ServerEngine:
    return engine_for(server.url, **{"retries": AT_ONCE, "max_running": 4, **options})


def at_first(num: int, reply: Reply) -> Callable[[dict[str, Any]], Reply]:
    """Every prompt has this reply so many times, then an answer."""
    seen: Counter[str] = Counter()

    def behaviour(body: dict[str, Any]) -> Reply:
        seen[str(body["prompt"])] += 1
        return reply if seen[str(body["prompt"])] <= num else answer()

    return behaviour


def once(token: int, reply: Reply) -> Callable[[dict[str, Any]], Reply]:
    """The prompt with this token always has this reply."""
    return lambda body: reply if body["prompt"] == [token] else answer()


@pytest.mark.parametrize(
    "reply",
    [
        failure(408),
        failure(429, Retry_After="0"),
        failure(500),
        failure(502),
        failure(503, Retry_After="0"),
        failure(504),
        Reply(drops=True),
        Reply(hangs=True),
        Reply(b"{"),
        Reply({"choices": []}),
        Reply({"choices": [{"text": "a", "finish_reason": "stop"}], "usage": 3}),
        answer("half", finish_reason="abort"),
    ],
    ids=[
        "408",
        "429",
        "500",
        "502",
        "503",
        "504",
        "drop",
        "hang",
        "json",
        "none",
        "usage",
        "abort",
    ],
)
def test_failures_that_pass(reply: Reply) -> None:
    with fake_server(at_first(2, reply)) as server:
        timeout_s = 0.5 if reply.hangs else 60
        completions = list(hasty(server, timeout_s=timeout_s).generate(prompts(9), QUESTION))
        assert sorted(each.number for each in completions) == list(range(9))
        assert {each.text for each in completions} == {"yes"}
        assert len(server.bodies) == 27 or reply.hangs


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (failure(500, "boom"), "failed 5 times, last: HTTP 500: boom"),
        (Reply(drops=True), "failed 5 times, last: the connection broke: Server disconnected"),
        (Reply(hangs=True), "failed 5 times, last: no reply within 0.5 s"),
        (Reply(b"oh"), "failed 5 times, last: the reply is no JSON: 'oh'"),
        (answer(finish_reason="abort"), "failed 5 times, last: the server broke the answer off"),
    ],
    ids=["500", "drop", "hang", "json", "abort"],
)
def test_failures_of_one_prompt(reply: Reply, error: str) -> None:
    with fake_server(once(3, reply)) as server:
        timeout_s = 0.5 if reply.hangs else 60
        completions = list(hasty(server, timeout_s=timeout_s).generate(prompts(9), QUESTION))
        assert [each.number for each in completions if each.error] == [2]
        [failed] = [each for each in completions if each.error]
        assert failed.error.startswith(error)
        assert server.prompts.count([3]) == 5


@pytest.mark.parametrize("seed", range(3))
def test_failures_by_chance(seed: int) -> None:
    """Every prompt has one completion, which is its own."""
    random = Random(seed)
    replies = [failure(429), failure(500), failure(503), Reply(drops=True), Reply(b"{")]

    def behaviour(body: dict[str, Any]) -> Reply:
        if random.random() < 0.4:
            return random.choice(replies)
        token = body["prompt"][0]
        # none of the first ones: a server that has answered nothing yet may refuse everything
        is_refused = token > 100 and token % 10 == 0
        reply = failure(400, str(token)) if is_refused else answer(str(token))
        return replace(reply, delay_s=random.choice([0, 0.001]))

    with fake_server(behaviour) as server:
        completions = list(hasty(server, max_running=16).generate(prompts(300), QUESTION))
        assert sorted(each.number for each in completions) == list(range(300))
        for each in completions:
            token = each.number + 1
            if each.text:
                assert (each.text, each.error) == (str(token), "")
                assert token <= 100 or token % 10
            else:
                assert each.error == f"HTTP 400: {token}" or each.error.startswith("failed 5 ")
        assert server.most_running <= 16
        assert not engine_threads()


def test_a_prompt_that_crashes_the_server() -> None:
    """Those that the server has beside it fail with it, but not as often."""

    def behaviour(body: dict[str, Any]) -> Reply:
        return Reply(crashes=True) if body["prompt"] == [40] else replace(answer(), delay_s=0.03)

    with fake_server(behaviour) as server:
        completions = list(hasty(server, max_running=32).generate(prompts(300), QUESTION))
        assert sorted(each.number for each in completions) == list(range(300))
        [failed] = [each for each in completions if each.error]
        assert failed.number == 39 and failed.error.startswith("failed 5 times")
        # a request on a connection that a crash has just closed does not arrive
        assert 3 <= server.prompts.count([40]) <= 5


def test_a_prompt_that_is_passed_over() -> None:
    retries = RetryPolicy(first_delay_s=0.001, max_delay_s=0.001, max_passed_over=3)
    with fake_server(once(1, failure(429, "too large"))) as server:
        completions = list(hasty(server, retries=retries).generate(prompts(500), QUESTION))
        [failed] = [each for each in completions if each.error]
        assert failed.number == 0
        pattern = r"turned away \d+ times while others were answered: HTTP 429: too large"
        assert re.fullmatch(pattern, failed.error)


@pytest.mark.parametrize("status", [400, 404, 413, 422])
def test_prompts_that_are_refused(status: int) -> None:
    reply = failure(status, "too long " * 100)
    with fake_server(once(3, reply)) as server:
        completions = list(hasty(server).generate(prompts(9), QUESTION))
        [refused] = [each for each in completions if each.error]
        assert refused.number == 2
        assert refused.error.startswith(f"HTTP {status}: too long")
        assert len(refused.error) < 350
        assert len(server.bodies) == 9


def test_errors_in_other_forms() -> None:
    pages: list[tuple[Any, str]] = [
        ({"error": "Unauthorized"}, "HTTP 400: Unauthorized"),
        ({"message": "old"}, "HTTP 400: old"),
        ({"detail": [{"msg": "field"}]}, 'HTTP 400: [{"msg": "field"}]'),
        ([], "HTTP 400: []"),
        (b"<p>nginx</p>", "HTTP 400: <p>nginx</p>"),
    ]
    with fake_server(lambda body: Reply(pages[body["prompt"][0] - 1][0], 400)) as server:
        engine = hasty(server, max_running=1, retries=replace(AT_ONCE, max_refused_in_a_row=9))
        completions = list(engine.generate(prompts(len(pages)), QUESTION))
        assert [each.error for each in completions] == [error for _, error in pages]


@pytest.mark.parametrize("status", [401, 402, 403])
def test_nobody_is_let_in(status: int) -> None:
    with fake_server(once(5, failure(status, "who are you"))) as server:
        completions = hasty(server, max_running=1).generate(prompts(100), QUESTION)
        assert [next(completions).number for _ in range(4)] == list(range(4))
        with pytest.raises(EngineError, match=f"HTTP {status}: who are you"):
            next(completions)
        assert not engine_threads()
        assert len(server.bodies) == 5


def test_every_prompt_fails() -> None:
    with fake_server(lambda body: failure(500, "engine is dead")) as server:
        given = []
        with pytest.raises(EngineError, match="last 32 prompts failed, each 5 times, .*is dead"):
            for completion in hasty(server).generate(prompts(1000), QUESTION):
                given.append(completion)
        assert len(given) == 31 and all(each.error for each in given)


def test_a_server_that_asks_to_wait_for_a_day() -> None:
    reply = failure(429, "quota", Retry_After="86400")
    with (
        fake_server(lambda body: reply) as server,
        pytest.raises(EngineError, match="asks to wait 86400 s .*quota"),
    ):
        list(hasty(server).generate(prompts(1), QUESTION))


def test_the_server_goes_away_for_good() -> None:
    retries = RetryPolicy(first_delay_s=0.001, max_delay_s=0.01, patience_s=0.2)
    with fake_server() as server:
        completions = hasty(server, retries=retries).generate(prompts(1000), QUESTION)
        next(completions)
        server.stop()
        with pytest.raises(EngineError, match="no connection.*kept in its checkpoint"):
            list(completions)
        assert not engine_threads()


def test_the_server_is_restarted() -> None:
    """Requests that it has at that time are made again."""
    with (
        fake_server(lambda body: Reply(hangs=body["prompt"][0] > 20, page=answer().page)) as server,
        ThreadPoolExecutor() as threads,
    ):
        engine = hasty(server, retries=RetryPolicy())
        given = threads.submit(list, engine.generate(prompts(200), QUESTION))
        server.wait_until_running(4)
        server.stop()
        server.behaviour = lambda body: answer()
        server.start()
        assert sorted(each.number for each in given.result()) == list(range(200))
        assert not any(each.error for each in given.result())
        assert server.num_model_checks == 2


def test_another_model_is_there_after_a_restart() -> None:
    with fake_server() as server:
        engine = hasty(server)
        server.behaviour = once(20, Reply(drops=True))
        server.models["data"] = [VLLM_MODEL | {"root": "org/other"}]
        with pytest.raises(EngineError, match=r"no longer has 'tiny \[org/tiny\]' but \['tiny \[o"):
            list(engine.generate(prompts(200), QUESTION))


def test_the_model_is_gone() -> None:
    with fake_server(lambda body: failure(404, "The model `tiny` does not exist.")) as server:
        engine = hasty(server)
        server.models["data"] = []
        with pytest.raises(EngineError, match="the server no longer has 'tiny"):
            list(engine.generate(prompts(10), QUESTION))


def test_models_that_cannot_be_checked_for_a_while() -> None:
    """A gateway without the server behind it has neither the path nor the models."""
    with fake_server(at_first(1, failure(404))) as server:
        engine = hasty(server)
        pages = [failure(404), Reply(b"<html>"), Reply({}), Reply(drops=True)]
        models = server.models
        server.models = lambda: pages.pop() if pages else models
        completions = list(engine.generate(prompts(20), QUESTION))
        assert sorted(each.number for each in completions) == list(range(20))


def test_delays_double_up_to_the_longest() -> None:
    policy = RetryPolicy(first_delay_s=1.0, max_delay_s=10.0)
    for num_failures, longest_s in [(1, 1), (2, 2), (3, 4), (4, 8), (5, 10), (10_000, 10)]:
        delays_s = [policy.delay_s(num_failures) for _ in range(200)]
        assert longest_s / 2 <= min(delays_s) < max(delays_s) <= longest_s


def test_retry_after() -> None:
    assert retry_after_s(None) == retry_after_s("") == retry_after_s("soon") == 0
    assert retry_after_s("-3") == 0
    assert retry_after_s("2.5") == 2.5
    assert retry_after_s("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    tomorrow = datetime.now(timezone.utc) + timedelta(days=1)
    assert 86000 < retry_after_s(format_datetime(tomorrow)) <= 86400
    assert 86000 < retry_after_s(format_datetime(tomorrow, usegmt=True)) <= 86400


@pytest.mark.parametrize("name", ["max_retries", "patience_s"])
def test_bad_policies(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=-1 given, expected at least 0"):
        replace(RetryPolicy(), **{name: -1})
