# SPDX-License-Identifier: Apache-2.0
"""How many prompts a server is asked that refuses them, turns them away or is not there."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest

from tests.support.waiting import WAIT_S
from tests.tables.engines.server.fake_server import (
    OTHER_MODEL,
    Reply,
    answer,
    chat_answer,
    failure,
    fake_server,
)
from tests.tables.engines.server.test_engine import QUESTION, engine_for, engine_threads, prompts
from tests.tables.engines.server.test_failures import AT_ONCE, at_first, hasty
from vllm_relay.tables.engines.base import EngineError
from vllm_relay.tables.engines.server.admission import Admission
from vllm_relay.tables.engines.server.engine import ServerEngine
from vllm_relay.tables.engines.server.http import HttpClient, RequestRefused, RetryPolicy


@pytest.mark.parametrize("status", [429, 503])
def test_all_are_turned_away(status: int) -> None:
    retries = RetryPolicy(first_delay_s=0.001, max_delay_s=0.001, patience_s=0.1)
    with fake_server(lambda body: failure(status, "later")) as server:
        with pytest.raises(EngineError, match=f"answered no prompt .*HTTP {status}: later.*start"):
            list(hasty(server, retries=retries).generate(prompts(100), QUESTION))
        assert not engine_threads()


def test_one_that_is_turned_away_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server answers prompts that come after it, so it need not wait as long as it was told."""
    at_once = at_first(1, failure(429, "busy", Retry_After=f"{2 * WAIT_S}"))
    is_told = asyncio.Event()
    delay_s = RetryPolicy.delay_s

    def told(*given: Any) -> float:
        server._loop.call_soon_threadsafe(is_told.set)
        return delay_s(*given)

    def behaviour(body: dict[str, Any]) -> Reply:
        if body["prompt"] == [8]:
            # until then the server has one
            return replace(answer(), held_until=is_told)
        return at_once(body) if body["prompt"] == [9] else answer()

    monkeypatch.setattr(RetryPolicy, "delay_s", told)
    with fake_server(behaviour) as server:
        began_s = time.monotonic()
        completions = list(hasty(server, max_running=8).generate(prompts(296), QUESTION))
        assert time.monotonic() - began_s < WAIT_S
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
    paid = [[number + 1] for number in range(500)]

    def behaviour(body: dict[str, Any]) -> Reply:
        return answer() if body["prompt"] in paid else failure(422, "out of credit")

    with fake_server(behaviour) as server:
        given = []
        with pytest.raises(EngineError, match="refuses every prompt.*out of credit"):
            for completion in hasty(server, max_running=8).generate(prompts(2000), QUESTION):
                given.append(completion)
        assert sum(not each.error for each in given) >= 490
        # those that it had when the fourth was refused, and one that asks whether all are
        assert len(server.bodies) <= 500 + 3 + 8 + 1


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


@pytest.mark.parametrize(
    ("enters_before", "expected"), [("all", True), ("the refusal", True), ("others", False)]
)
def test_an_answer_to_an_earlier_prompt_says_nothing_of_later_ones(
    enters_before: str, expected: bool
) -> None:
    """The server may have taken it before it refused those that it was asked beside it."""

    async def refuse(admission: Admission, number: int) -> None:
        with pytest.raises(RequestRefused):
            async with admission.place(number):
                if enters_before == "the refusal" and number == 2:
                    await answered.__aenter__()
                raise RequestRefused(422, "out of credit")

    async def is_suspended() -> bool:
        nonlocal answered
        admission = Admission(8, RetryPolicy(max_refused_in_a_row=4))
        async with admission.place(0):
            pass
        answered = admission.place(1)
        if enters_before == "all":
            await answered.__aenter__()
        await refuse(admission, 2)
        if enters_before == "others":
            await answered.__aenter__()
        await refuse(admission, 3)
        await refuse(admission, 4)
        await answered.__aexit__(None, None, None)
        await refuse(admission, 5)
        return admission.is_suspended

    answered: Any = None
    assert asyncio.run(is_suspended()) == expected
