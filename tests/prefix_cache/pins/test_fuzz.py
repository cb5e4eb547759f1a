# SPDX-License-Identifier: Apache-2.0
"""Whatever is sent to the routes for pins and contexts: an answer, soon, and no memory for it."""

from __future__ import annotations

import asyncio
import os
import time
from argparse import Namespace
from collections import Counter
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
import pytest
from fastapi import FastAPI

from tests.long_context import context_engine
from tests.modules.chat_templates import character_tokenizer
from tests.prefix_cache.pins.pin_scheduler import BLOCK_SIZE, MAX_MODEL_LEN
from tests.prefix_cache.pins.random_requests import RandomRequests
from tests.prefix_cache.pins.test_http import Engine, OnlineRenderer
from tests.support.depth import cases
from vllm_relay.modules.markup.pml import parse_schema
from vllm_relay.modules.prompt.schema_store import SchemaStore
from vllm_relay.serving.contexts import ContextEndpoints
from vllm_relay.serving.modular_requests import keep_store
from vllm_relay.serving.pins import PinEndpoints

MAX_STEP_S = 0.05
MAX_GROWTH_BYTES = 16 << 20
EXPECTED = {200, 201, 204, 400, 403, 404, 405, 409, 507}
SCHEMA = '<schema name="trip"><module name="hotel">A hotel.</module></schema>'


class TimedEngine(Engine):
    """Notes how long a command keeps its engine core."""

    longest_s = 0.0

    async def call_utility_all_async(self, method: str, *args: Any) -> list[Any]:
        start_s = time.thread_time()
        answers = await super().call_utility_all_async(method, *args)
        self.longest_s = max(self.longest_s, time.thread_time() - start_s)
        for scheduler in self.schedulers:
            scheduler.now_s += 0.01
        return answers


class TimedContextEngine(context_engine.Engine):
    longest_s = 0.0

    def call_utility(self, method: str, *args: Any) -> Any:
        start_s = time.thread_time()
        answer = super().call_utility(method, *args)
        self.longest_s = max(self.longest_s, time.thread_time() - start_s)
        self.prompts.clear()
        return answer


async def app_of(endpoints: Any, engine: Any, renderer: Any) -> FastAPI:
    app = FastAPI()
    app.state.args = Namespace(api_key=["secret"])
    app.state.engine_client, app.state.online_renderer = engine, renderer
    endpoints.attach_router(app)
    await endpoints.init_state(engine, app.state, app.state.args)
    return app


@dataclass(frozen=True)
class Seen:
    """Of many requests: how many had which status, the longest command, and the memory's growth
    after the first fifth."""

    statuses: Counter[int]
    longest_s: float
    growth_bytes: int


async def send(num_requests: int, seed: int) -> Seen:
    store = SchemaStore(
        character_tokenizer(None), block_size=BLOCK_SIZE, max_model_len=MAX_MODEL_LEN
    )
    store.add(parse_schema(SCHEMA))
    renderer = OnlineRenderer()
    keep_store(renderer, store)
    pins = TimedEngine(max_pinned_fraction=0.5, system_prompts=["be brief"])
    contexts = TimedContextEngine(contexts=["be brief " * 9])
    clients = {
        name: httpx.AsyncClient(
            transport=httpx.ASGITransport(await app_of(endpoints, engine, of)),
            base_url="http://server",
            headers={"Authorization": "Bearer secret"},
        )
        for name, endpoints, engine, of in (
            ("pins", PinEndpoints(), pins, renderer),
            ("contexts", ContextEndpoints(), contexts, context_engine.OnlineRenderer()),
        )
    }
    requests, process = RandomRequests(seed), psutil.Process()
    statuses: Counter[int] = Counter()
    rss_bytes = 0
    for number in range(num_requests):
        method, path, body = requests.next()
        client = clients[path.partition("/")[0]]
        answer = await client.request(method, f"/relay/{path}", content=body)
        assert answer.status_code in EXPECTED, (method, path, body, answer.text)
        statuses[answer.status_code] += 1
        if number == num_requests // 5:
            rss_bytes = process.memory_info().rss
    growth_bytes = process.memory_info().rss - rss_bytes
    [system, *_] = pins.scheduler.pins.entries()
    assert (system["id"], system["resident"]) == ("system-0", True)
    return Seen(statuses, max(pins.longest_s, contexts.longest_s), growth_bytes)


def check(seen: Seen) -> None:
    assert seen.statuses.keys() == EXPECTED
    assert seen.longest_s < MAX_STEP_S
    assert seen.growth_bytes < MAX_GROWTH_BYTES


@pytest.mark.parametrize("seed", range(2))
def test_random_requests(seed: int) -> None:
    check(asyncio.run(send(cases(500), seed)))


@pytest.mark.soak
def test_many_random_requests() -> None:
    check(asyncio.run(send(5 * int(os.environ.get("RELAY_SOAK_CASES", "20000")), seed=7)))
