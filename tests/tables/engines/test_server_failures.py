# SPDX-License-Identifier: Apache-2.0
"""Servers that fail, for one prompt or for all."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from random import Random
from typing import Any

import pytest

from tests.tables.engines.fake_server import (
    OTHER_MODEL,
    VLLM_MODEL,
    FakeServer,
    Reply,
    answer,
    chat_answer,
    failure,
    fake_server,
)
from tests.tables.engines.test_server import QUESTION, engine_for, engine_threads, prompts
from vllm_relay.tables.engines import EngineError
from vllm_relay.tables.engines.server import ServerEngine
from vllm_relay.tables.engines.server_http import HttpClient
from vllm_relay.tables.engines.server_retries import RetryPolicy, retry_after_s

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
        reply = answer(str(token)) if token % 10 else failure(400, str(token))
        return replace(reply, delay_s=random.choice([0, 0.001]))

    with fake_server(behaviour) as server:
        completions = list(hasty(server, max_running=16).generate(prompts(300), QUESTION))
        assert sorted(each.number for each in completions) == list(range(300))
        for each in completions:
            token = each.number + 1
            if each.text:
                assert (each.text, each.error) == (str(token), "") and token % 10
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


@pytest.mark.parametrize("status", [429, 503])
def test_all_are_turned_away(status: int) -> None:
    retries = RetryPolicy(first_delay_s=0.001, max_delay_s=0.001, patience_s=0.1)
    with fake_server(lambda body: failure(status, "later")) as server:
        with pytest.raises(EngineError, match=f"answered no prompt .*HTTP {status}: later.*start"):
            list(hasty(server, retries=retries).generate(prompts(100), QUESTION))
        assert not engine_threads()


def test_one_that_is_turned_away_holds_up_no_other() -> None:
    """The server answers prompts that come after it, so it need not wait as long as it was told."""
    reply = failure(429, "busy", Retry_After="30")
    behaviour = at_first(1, reply)
    with fake_server(lambda body: behaviour(body) if body["prompt"] == [9] else answer()) as server:
        began_s = time.monotonic()
        completions = list(hasty(server, max_running=8).generate(prompts(296), QUESTION))
        assert time.monotonic() - began_s < 15
        assert sorted(each.number for each in completions) == list(range(296))
        assert not any(each.error for each in completions)
        assert server.prompts.count([9]) == 2


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_is_full_is_given_as_many_as_it_takes(status: int) -> None:
    def behaviour(body: dict[str, Any]) -> Reply:
        if server.num_running > 8:
            return failure(status, "full", Retry_After="30")
        return replace(answer(), delay_s=0.02)

    with fake_server(behaviour) as server:
        completions = list(hasty(server, max_running=64).generate(prompts(400), QUESTION))
        assert sorted(each.number for each in completions) == list(range(400))
        assert not any(each.error for each in completions)
        assert len(server.bodies) < 400 + 64 + 400 / 5


@pytest.mark.parametrize("status", [400, 404, 405, 413, 422])
@pytest.mark.parametrize("max_running", [1, 64])
def test_a_server_that_refuses_everything_is_asked_a_few_times(
    status: int, max_running: int
) -> None:
    with fake_server(lambda body: failure(status, "no model has this name")) as server:
        with pytest.raises(EngineError, match=r"refuses every prompt.*no model has this name"):
            list(hasty(server, max_running=max_running).generate(prompts(2000), QUESTION))
        assert len(server.bodies) <= 5
        assert not engine_threads()


def test_a_server_that_refuses_everything_later_on() -> None:
    def behaviour(body: dict[str, Any]) -> Reply:
        return answer() if len(server.bodies) <= 500 else failure(422, "out of credit")

    with fake_server(behaviour) as server:
        given = []
        with pytest.raises(EngineError, match="refuses every prompt.*out of credit"):
            for completion in hasty(server, max_running=8).generate(prompts(2000), QUESTION):
                given.append(completion)
        assert sum(not each.error for each in given) >= 490
        assert len(server.bodies) <= 500 + 8 + 4 + 1


def test_long_prompts_in_a_row_are_refused_alone() -> None:
    """A short prompt in their place is answered, so the job goes on."""

    def behaviour(body: dict[str, Any]) -> Reply:
        is_long = body["messages"][0]["content"] in [f"row {number}" for number in range(300)]
        return failure(400, "the context is too long") if is_long else chat_answer()

    with fake_server(behaviour, OTHER_MODEL) as server:
        engine = ServerEngine(server.url, retries=AT_ONCE, max_running=4)
        completions = list(engine.generate(prompts(400), QUESTION))
        assert sorted(each.number for each in completions if each.error) == list(range(300))
        assert len(server.bodies) <= 400 + 8


def test_one_asks_for_all_while_a_server_turns_everybody_away() -> None:
    retries = RetryPolicy(first_delay_s=0.05, max_delay_s=0.1, patience_s=1.0)
    with fake_server() as server:
        engine = hasty(server, retries=retries, max_running=64)
        completions = engine.generate(prompts(2000), QUESTION)
        next(completions)
        server.behaviour = lambda body: failure(502, "no backend")
        before = len(server.bodies)
        with pytest.raises(EngineError, match="answered no prompt.*no backend"):
            list(completions)
        assert len(server.bodies) - before <= 64 + 64 + 1.0 / 0.025


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


def test_a_server_that_is_away_is_asked_for_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    retries = RetryPolicy(first_delay_s=0.05, max_delay_s=0.1, patience_s=1.0)
    num_requests = 0
    request = HttpClient._request

    async def counted(client: HttpClient, *given: Any) -> bytes:
        nonlocal num_requests
        num_requests += 1
        return await request(client, *given)

    monkeypatch.setattr(HttpClient, "_request", counted)
    with fake_server() as server:
        engine = hasty(server, retries=retries, max_running=64)
        completions = engine.generate(prompts(2000), QUESTION)
        next(completions)
        server.stop()
        before = num_requests
        with pytest.raises(EngineError, match="no connection"):
            list(completions)
        # those that it had, and then one every 50 ms at most
        assert num_requests - before <= 2 * 64 + 20


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


def test_servers_are_given_the_time_that_they_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waits_s: list[float] = []
    delay_s = RetryPolicy.delay_s

    def noted(policy: RetryPolicy, num_failures: int, retry_after_s: float = 0.0) -> float:
        found_s = delay_s(policy, num_failures, retry_after_s)
        if not retry_after_s:
            return 0.0
        waits_s.append(found_s)
        return found_s / 100

    arrived_s: list[float] = []
    at_once = at_first(1, failure(429, Retry_After="7"))

    def behaviour(body: dict[str, Any]) -> Reply:
        arrived_s.append(time.monotonic())
        return at_once(body)

    with fake_server(behaviour) as server:
        engine = engine_for(server.url, max_running=1)
        monkeypatch.setattr(RetryPolicy, "delay_s", noted)
        list(engine.generate(prompts(3), QUESTION))
    assert len(waits_s) == 3 and all(7.25 <= wait_s <= 7.5 for wait_s in waits_s)
    assert server.prompts == [[1], [1], [2], [2], [3], [3]]
    assert all(arrived_s[at + 1] - arrived_s[at] >= 0.07 for at in (0, 2, 4))


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
