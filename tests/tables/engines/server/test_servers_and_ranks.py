# SPDX-License-Identifier: Apache-2.0
"""Prompts of a job over several servers, and the data-parallel ranks of one."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest

from tests.support.waiting import WAIT_S
from tests.tables.engines.server.fake_server import (
    OTHER_MODEL,
    VLLM_MODEL,
    Reply,
    answer,
    failure,
    fake_server,
)
from tests.tables.engines.server.test_engine import (
    CACHE_METRICS,
    QUESTION,
    WordTokenizer,
    engine_for,
    prompts,
)
from vllm_relay.tables import open_engine
from vllm_relay.tables.engines.base import Prompt
from vllm_relay.tables.engines.server.http import RetryPolicy


def test_a_rank_of_a_server_gets_all_prompts() -> None:
    with fake_server() as server:
        server.metrics = CACHE_METRICS % 100
        engine = engine_for(server.url, data_parallel_rank=1)
        assert len(list(engine.generate(prompts(5), QUESTION))) == 5
        assert server.ranks == ["1"] * 5
        assert len(list(engine_for(server.url).generate(prompts(1), QUESTION))) == 1
        assert server.ranks[5:] == [""]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (VLLM_MODEL, "data_parallel_rank=2 given, and http.* has 2 ranks: give as many as it was"),
        (OTHER_MODEL, "data_parallel_rank=2 given, and http.* is not vLLM"),
    ],
)
def test_a_rank_that_is_not_there_is_refused(model: dict[str, Any], message: str) -> None:
    with fake_server(model=model) as server:
        server.metrics = CACHE_METRICS % 100
        with pytest.raises(ValueError, match=message):
            engine_for(server.url, data_parallel_rank=2)


def test_a_rank_that_the_server_refuses_ends_the_job() -> None:
    def only_rank_0(body: dict[str, Any]) -> Reply:
        rank = server.ranks[-1]
        if rank == "0":
            return answer()
        return failure(400, f"data_parallel_rank {rank} is out of range [0, 1).")

    with fake_server(only_rank_0) as server:  # which has no metrics
        opened = open_engine(server.url, data_parallel_ranks=2, tokenizer=WordTokenizer())
        message = f"data_parallel_rank=1 given, and {server.url} has no such rank .*: give as many"
        with pytest.raises(ValueError, match=message):
            list(opened.generate(prompts(40), QUESTION))


def test_servers_and_ranks_share_the_prompts_of_a_job() -> None:
    groups = [[group] * 64 + [row] for group in range(1, 5) for row in range(20)]
    all_have_two = asyncio.Event(), asyncio.Event()
    asked: list[tuple[int, str, str]] = []

    def behaviour(number: int) -> Reply:
        server = servers[number]
        asked.append((server.prompts[-1][0], server.url, server.ranks[-1]))
        if len(asked) == 8:
            for each, event in zip(servers, all_have_two, strict=True):
                each._loop.call_soon_threadsafe(event.set)
        return replace(answer(), held_until=all_have_two[number])

    with (
        fake_server(lambda body: behaviour(0)) as first,
        fake_server(lambda body: behaviour(1)) as second,
    ):
        servers = first, second
        for each in servers:
            each.metrics = CACHE_METRICS % 100
        opened = open_engine(
            [first.url, second.url],
            data_parallel_ranks=2,
            tokenizer=WordTokenizer(),
            max_running=2,
        )
        given = (Prompt(number, "", tokens) for number, tokens in enumerate(groups))
        found = [each.number for each in opened.generate(given, QUESTION)]
        assert sorted(found) == list(range(len(groups)))
        homes = set(asked[:8])
        assert sorted(group for group, *_ in homes) == [1, 2, 3, 4]
        assert len({(url, rank) for _, url, rank in homes}) == 4
        # one that has no group any more joins others: in the second, third and fourth that ends
        assert len(set(asked)) <= 4 + 1 + 2 + 3


def test_a_server_that_goes_leaves_its_prompts_to_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def answer_one(body: dict[str, Any]) -> Reply:
        if len(goes.bodies) == 1:
            return answer()
        has_prompts.set()
        return Reply(hangs=True)

    def answer_when_the_other_has_prompts(body: dict[str, Any]) -> Reply:
        assert has_prompts.wait(WAIT_S)
        return answer()

    has_prompts = threading.Event()
    with (
        fake_server(answer_when_the_other_has_prompts) as stays,
        fake_server(answer_one) as goes,
    ):
        retries = RetryPolicy(patience_s=0.2, first_delay_s=0.01)
        options: Any = {"tokenizer": WordTokenizer(), "max_running": 4, "retries": retries}
        opened = open_engine([stays.url, goes.url], **options)
        found = []
        for completion in opened.generate(prompts(100), QUESTION):
            found.append(completion)
            if len(found) == 20:
                goes.stop()
        assert sorted(each.number for each in found) == list(range(100))
        assert not any(each.error for each in found)
        assert any(f"{goes.url} is gone" in message for message in caplog.messages)
