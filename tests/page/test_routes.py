# SPDX-License-Identifier: Apache-2.0
"""The routes of the live page, on engines without a model."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
from argparse import Namespace
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from tests.page.test_record import Recorded
from tests.support.waiting import WAIT_S
from vllm_relay.commands import engine as commands
from vllm_relay.page import viewers
from vllm_relay.page.commands import COMMANDS
from vllm_relay.page.feed import FORGET_S
from vllm_relay.prefix_cache.pins.commands import COMMANDS as PIN_COMMANDS
from vllm_relay.serving.page import PageEndpoints
from vllm_relay.serving.pins import PinEndpoints


class Engine:
    """An AsyncLLM around schedulers, one for each rank. A letter is a token."""

    def __init__(self, ranks: int = 1, page: bool = True) -> None:
        self.engine_ranks_managed = list(range(ranks))
        self.schedulers = [Recorded() for _ in range(ranks)]
        for scheduler in self.schedulers:
            scheduler.relay_page = scheduler.feed
        self.engine_core = self
        tokenizer = SimpleNamespace(decode=lambda tokens: "".join(map(chr, tokens)))
        self.renderer = SimpleNamespace(tokenizer=tokenizer)
        self.vllm_config = SimpleNamespace(
            additional_config={"relay": {"page": page}},
            scheduler_config=SimpleNamespace(scheduler_cls=None),
            attention_config=SimpleNamespace(backend=None, backend_per_kind={}),
            speculative_config=None,
            model_config=SimpleNamespace(served_model_name=["tiny"], model="tiny"),
        )
        self.polls = 0
        self.fails: Exception | None = None
        self.dies_after_hello = False
        """So that the stream of a test client, which reads to its end, has one."""

    async def call_utility_all_async(self, method: str, *args: Any) -> list[Any]:
        assert method == "relay_command"
        if self.dies_after_hello and self.polls == 1:
            self.fails = RuntimeError("ended")
        self.polls += args[0] == "watch_forest"
        if self.fails is not None:
            raise self.fails
        cores = [SimpleNamespace(scheduler=each) for each in self.schedulers]
        return [commands.run({**COMMANDS, **PIN_COMMANDS}, core, *args) for core in cores]

    async def generate(
        self, prompt: Any, params: Any, request_id: str, data_parallel_rank: int | None = None
    ) -> AsyncIterator[None]:
        scheduler = self.schedulers[data_parallel_rank or 0]
        scheduler.run(prompt["prompt_token_ids"], params.extra_args["relay_pin"])
        yield None


class FarEngine(Engine):
    """What it answers arrives later."""

    async def call_utility_all_async(self, method: str, *args: Any) -> list[Any]:
        answers = await super().call_utility_all_async(method, *args)
        for _ in range(5):
            await asyncio.sleep(0)
        return answers


async def _render(prompts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return prompts


def app_of(engine: Engine, *keys: str, routes: str = "guarded") -> FastAPI:
    app = FastAPI()
    app.state.args = Namespace(
        api_key=list(keys), additional_config={"relay": {"routes": routes, "page": True}}
    )
    engine.renderer.render_cmpl_async = _render
    app.state.engine_client, app.state.online_renderer = engine, SimpleNamespace()
    PinEndpoints().attach_router(app)
    endpoints = PageEndpoints()
    endpoints.attach_router(app)
    with contextlib.suppress(StopIteration):  # it waits for nothing
        endpoints.init_state(engine, app.state, app.state.args).send(None)
    return app


def client(engine: Engine, *keys: str, routes: str = "guarded") -> TestClient:
    """With the first of the server's API keys."""
    app = app_of(engine, *keys, routes=routes)
    return TestClient(app, headers={"Authorization": f"Bearer {keys[0]}"} if keys else {})


class Reader:
    """Reads the events of a viewer."""

    def __init__(self, stream: AsyncIterator[str]) -> None:
        self._stream = stream

    async def next(self) -> tuple[str, dict[str, Any]]:
        """The next event that is no comment."""
        while True:
            lines = (await anext(self._stream)).splitlines()
            if not lines[0].startswith(":"):
                _, event, data, _ = lines
                return event.removeprefix("event: "), json.loads(data.removeprefix("data: "))


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(viewers, "POLL_EVERY_S", 0.0)


async def _join(app: FastAPI, texts: bool = True) -> Reader:
    return Reader(await app.state.relay_viewers.join(texts))


def test_a_viewer_is_told_all_and_then_what_changes() -> None:
    async def look() -> None:
        engine = Engine(ranks=2)
        app = app_of(engine, "secret")
        engine.schedulers[1].run(list(map(ord, "abcdefghi")))
        reader = await _join(app)
        kind, hello = await reader.next()
        assert kind == "hello"
        assert hello == {
            "version": 2,
            "model": "tiny",
            "block_size_tokens": 4,
            "sources": [{"id": "0", "name": "rank 0"}, {"id": "1", "name": "rank 1"}],
            "texts": True,
        }
        first, second = [await reader.next() for _ in range(2)]
        assert first[0] == second[0] == "snapshot"
        by_source = {data["source"]: data for _, data in (first, second)}
        assert by_source["0"]["nodes"] == []
        [node] = by_source["1"]["nodes"]
        assert (node["tokens"], node["parent"], node["next_out"]) == (8, None, 0)
        kind, delta = await reader.next()  # the text comes when it was asked for
        assert (kind, delta["source"]) == ("delta", "1")
        assert delta["changed"] == [{"id": node["id"], "text": "abcdefgh"}]
        engine.schedulers[0].run(list(map(ord, "stuvwxyz!")))
        kind, delta = await reader.next()
        assert (kind, delta["source"], len(delta["added"])) == ("delta", "0", 1)

    asyncio.run(look())


def test_texts_are_hidden_from_who_does_not_ask() -> None:
    async def look() -> None:
        engine = Engine()
        app = app_of(engine, "secret")
        engine.schedulers[0].run(list(map(ord, "abcdefghi")))
        reading, other = await _join(app, True), await _join(app, False)
        for reader in (reading, other):
            assert (await reader.next())[0] == "hello"
            assert (await reader.next())[1]["nodes"][0]["text"] is None
        assert (await reading.next())[1]["changed"][0]["text"] == "abcdefgh"
        _, delta = await other.next()
        assert delta["changed"] == []
        late = await _join(app, False)
        await late.next()
        assert (await late.next())[1]["nodes"][0]["text"] is None

    asyncio.run(look())


def test_what_nobody_looks_at_is_evicted_too() -> None:
    """Another process of the server may be asked than the one that shows the page."""
    engine = Engine(ranks=2)
    shown, asked = client(engine, "secret"), client(engine, "secret")
    engine.schedulers[1].run([*range(8), 50])
    engine.dies_after_hello = True
    page = shown.get("/relay/forest/events").text
    [snapshot] = [line for line in page.splitlines() if '"source":"1"' in line and "nodes" in line]
    [node] = json.loads(snapshot.removeprefix("data: "))["nodes"]
    engine.fails = None
    body = {"source": "0", "node": node["id"]}
    assert asked.post("/relay/forest/evict", json=body).status_code == 404
    body["source"] = "1"
    assert asked.post("/relay/forest/evict", json=body).json() == {"evicted_blocks": 2}
    assert engine.schedulers[1].cached() == {}


def test_two_at_once_find_what_nobody_looks_at() -> None:
    """And who joins beside them is told all."""
    engine = FarEngine()
    scheduler = engine.schedulers[0]
    scheduler.run(list(map(ord, "abcdabcd")))

    async def main() -> None:
        app = app_of(engine)
        watching = app.state.relay_viewers

        async def blocks_of_all() -> int:
            async with watching.source("0") as source:
                await asyncio.sleep(0)
                return len(source.forest.nodes)

        found = await asyncio.gather(blocks_of_all(), blocks_of_all(), _join(app), blocks_of_all())
        counts = [each for each in found if isinstance(each, int)]
        assert len(counts) == 3 and min(counts) > 0
        [reader] = [each for each in found if isinstance(each, Reader)]
        _, hello = await reader.next()
        _, snapshot = await reader.next()
        assert hello["block_size_tokens"] > 1 and snapshot["nodes"]

    asyncio.run(main())


def test_who_reads_slowly_is_told_all_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(viewers, "MAX_UNREAD_EVENTS", 3)

    async def look() -> None:
        engine = Engine()
        app = app_of(engine, "secret")
        slow, quick = await _join(app, False), await _join(app, False)
        for reader in (slow, quick):
            assert [(await reader.next())[0] for _ in range(2)] == ["hello", "snapshot"]
        for number in range(5):
            engine.schedulers[0].run([number] * 9)
            while not (await quick.next())[1].get("added"):
                pass
        kind, data = await slow.next()
        assert kind == "snapshot" and len(data["nodes"]) == 5
        engine.schedulers[0].run([100] * 9)
        while not (told := await slow.next())[1].get("added"):
            pass
        assert told[0] == "delta"

    asyncio.run(look())


def test_nobody_looks_and_nothing_is_asked() -> None:
    async def look() -> None:
        engine = Engine()
        app = app_of(engine, "secret")
        [scheduler] = engine.schedulers
        assert engine.polls == 0 and scheduler.feed.record.listeners == []
        stream = await app.state.relay_viewers.join(False)
        await anext(stream)
        assert engine.polls and len(scheduler.feed.record.listeners) == 1
        await stream.aclose()
        await app.state.relay_viewers._watching
        polls = engine.polls
        for _ in range(3):
            await asyncio.sleep(0)
        assert engine.polls == polls
        scheduler.clock_s += FORGET_S + 1
        scheduler.run([1] * 9)
        assert scheduler.feed.record.listeners == []
        again = await _join(app)  # begins anew
        assert [(await again.next())[0] for _ in range(2)] == ["hello", "snapshot"]

    asyncio.run(look())


def test_who_leaves_before_the_first_event_is_forgotten() -> None:
    async def look() -> None:
        app = app_of(Engine(), "secret")
        stream = await app.state.relay_viewers.join(False)
        task = app.state.relay_viewers._watching
        del stream
        gc.collect()
        await asyncio.wait_for(task, WAIT_S)

    asyncio.run(look())


def test_an_engine_that_ends_is_gone() -> None:
    async def look() -> None:
        engine = Engine()
        app = app_of(engine, "secret")
        reader = await _join(app)
        assert [(await reader.next())[0] for _ in range(2)] == ["hello", "snapshot"]
        engine.fails = RuntimeError("the engine is dead")
        assert await reader.next() == ("gone", {"source": "0"})
        with pytest.raises(StopAsyncIteration):
            await reader.next()
        with pytest.raises(Exception, match="the engine is dead"):
            await _join(app)

    asyncio.run(look())


def test_keys() -> None:
    engine = Engine()
    http = client(engine, "secret")
    for headers in ({"Authorization": ""}, {"Authorization": "Bearer wrong"}):
        for method, path in (("GET", "events"), ("POST", "evict")):
            assert http.request(method, f"/relay/forest/{path}", headers=headers).status_code == 401
        assert http.get("/relay/", headers=headers).status_code == 200
    assert engine.polls == 0
    refused = client(engine).post("/relay/forest/evict", json={"source": "0", "node": 1})
    assert refused.status_code == 403
    assert client(engine, routes="off").get("/relay/").status_code == 404


@pytest.mark.parametrize(
    ("keys", "routes", "shown"),
    [((), "guarded", False), ((), "open", True), (("k",), "guarded", 1)],
)
def test_who_reaches_a_server_without_key_reads_no_texts(
    keys: tuple[str, ...], routes: str, shown: bool
) -> None:
    engine = Engine()
    engine.dies_after_hello = True
    answer = client(engine, *keys, routes=routes).get("/relay/forest/events?texts=1")
    assert answer.headers["content-type"].startswith("text/event-stream")
    hello = json.loads(answer.text.split("data: ")[1].split("\n")[0])
    assert hello["texts"] is bool(shown)


def test_off_says_what_to_set() -> None:
    http = client(Engine(page=False), "secret")
    for answer in (
        http.get("/relay/forest/events"),
        http.post("/relay/forest/evict", json={"source": "0", "node": 1}),
        http.get("/relay/"),
    ):
        assert answer.status_code == 404
        assert "additional_config.relay.page=true" in answer.json()["error"]["message"]


def test_static_files() -> None:
    http = client(Engine(), "secret")
    page = http.get("/relay/", headers={"Authorization": ""})
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["cache-control"] == "no-cache"
    assert "default-src 'self'" in page.headers["content-security-policy"]
    static = http.get("/relay/static/index.html", headers={"Authorization": ""})
    assert static.text == page.text and static.headers["cache-control"] == "no-cache"
    same = {"If-None-Match": static.headers["etag"]}
    assert http.get("/relay/static/index.html", headers=same).status_code == 304
    for path in ("../commands.py", "%2e%2e/commands.py", "none.js"):
        assert http.get(f"/relay/static/{path}").status_code == 404


def test_a_node_is_pinned_and_evicted() -> None:
    async def look() -> None:
        import httpx

        engine = Engine()
        app = app_of(engine, "secret")
        [scheduler] = engine.schedulers
        scheduler.run([*range(8), 50])
        reader = await _join(app)
        await reader.next()
        [node] = (await reader.next())[1]["nodes"]
        given = {"source": "0", "node": node["id"]}
        headers = {"Authorization": "Bearer secret"}
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://server", headers=headers
        ) as http:
            pin = await http.post("/relay/pins", json={**given, "id": "a"})
            assert (pin.status_code, pin.json()["tokens"]) == (201, 8)
            while not any("pinned_tokens" in each for each in (await reader.next())[1]["changed"]):
                pass
            evict = {"source": "0", "node": node["id"]}
            refused = await http.post("/relay/forest/evict", json=evict)
            assert refused.status_code == 409 and "pinned" in refused.text
            assert (await http.delete("/relay/pins/a")).status_code == 204
            done = await http.post("/relay/forest/evict", json=evict)
            assert (done.status_code, done.json()["evicted_blocks"]) == (200, 3)
            assert scheduler.cached() == {}
            while not (told := (await reader.next())[1]).get("removed"):
                pass
            assert told["removed"] == [node["id"]]
            for body, status in (
                ({"source": "7", "node": 1}, 404),
                (evict, 404),
                ({"node": 1}, 400),
                ({**evict, "node": "1"}, 400),
                ({"source": "0", "id": 1}, 400),
            ):
                answer = await http.post("/relay/forest/evict", json=body)
                assert answer.status_code == status, answer.text
            for body, status in (
                (given, 404),
                ({"source": "0"}, 400),
                ({"node": 1}, 400),
                ({**given, "text": "x"}, 400),
            ):
                answer = await http.post("/relay/pins", json=body)
                assert answer.status_code == status, answer.text

    asyncio.run(look())
