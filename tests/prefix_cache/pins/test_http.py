# SPDX-License-Identifier: Apache-2.0
"""The routes for pins, on an engine without a model."""

from __future__ import annotations

import asyncio
import logging
from argparse import Namespace
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from tests.prefix_cache.pins.pin_scheduler import BLOCK_BYTES, Scheduler, tokens
from tests.support.starts import cancel_the_first_of_two
from vllm_relay import wiring
from vllm_relay.commands import engine as commands
from vllm_relay.commands.at_start import once
from vllm_relay.metrics import RelayStatLogger, refresh_async, snapshot
from vllm_relay.prefix_cache.pins.client import Declaration, pin_tokens_async
from vllm_relay.prefix_cache.pins.commands import COMMANDS
from vllm_relay.prefix_cache.pins.system_prompts import pin_system_prompts_async
from vllm_relay.serving.fresh_metrics import FreshMetrics
from vllm_relay.serving.pins import PinEndpoints


class Renderer:
    """A letter is a token."""

    tokenizer = object()

    async def render_cmpl_async(self, prompts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            {"prompt_token_ids": prompt.get("prompt_token_ids") or list(map(ord, prompt["prompt"]))}
            for prompt in prompts
        ]


class OnlineRenderer:
    chat_template = "a template"
    renderer = Renderer()

    async def render_chat(self, request: Any) -> Any:
        if request.messages[0]["role"] == "tool":
            raise ValueError("no tools here")
        text = "".join(f"<{each['role']}>{each['content']}" for each in request.messages)
        return [], [{"prompt_token_ids": list(map(ord, text))}]


class Engine:
    """An AsyncLLM around the schedulers of the other tests, one for each rank."""

    def __init__(
        self,
        *,
        scheduler: bool = True,
        ranks: int = 1,
        max_pinned_fraction: float = 1.0,
        **options: Any,
    ) -> None:
        self.engine_ranks_managed = list(range(ranks))
        self.schedulers: list[Any] = [
            Scheduler(max_pinned_fraction=max_pinned_fraction) if scheduler else SimpleNamespace()
            for _ in range(ranks)
        ]
        self.scheduler = self.schedulers[0]
        self.renderer = Renderer()
        self.engine_core = self
        self.vllm_config = SimpleNamespace(
            additional_config={"relay": {"scheduler": scheduler, **options}},
            scheduler_config=SimpleNamespace(scheduler_cls=None),
        )
        self.fails: Exception | None = None
        self.failing_rank: int | None = None  # None: all

    async def call_utility_all_async(self, method: str, *args: Any) -> list[Any]:
        assert method == "relay_command"
        cores = [SimpleNamespace(scheduler=each) for each in self.schedulers]
        return [commands.run(COMMANDS, core, *args) for core in cores]

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        return (await self.call_utility_all_async(method, *args))[0]

    async def generate(
        self, prompt: Any, params: Any, request_id: str, data_parallel_rank: int | None = None
    ) -> AsyncIterator[None]:
        assert (data_parallel_rank is None) == (len(self.schedulers) == 1)
        rank = data_parallel_rank or 0
        if self.fails is not None and self.failing_rank in (None, rank):
            raise self.fails
        self.schedulers[rank].run(prompt["prompt_token_ids"], params.extra_args["relay_pin"])
        yield None


def client(engine: Engine, *keys: str) -> TestClient:
    """With the first of the server's API keys."""
    app = FastAPI()
    keys = keys or ("secret",)
    app.state.args = Namespace(api_key=list(keys))
    endpoints = PinEndpoints()
    endpoints.attach_router(app)
    app.state.engine_client, app.state.online_renderer = engine, OnlineRenderer()
    asyncio.run(endpoints.init_state(engine, app.state, app.state.args))
    return TestClient(app, headers={"Authorization": f"Bearer {keys[0]}"})


def test_pins_come_and_go() -> None:
    http = client(Engine())
    made = http.post("/relay/pins", json={"prompt_token_ids": tokens(18), "id": "a"})
    assert made.status_code == 201
    entry = made.json()
    assert (entry["id"], entry["tokens"], entry["blocks"]) == ("a", 16, 4)
    assert entry["bytes"] == 2048
    again = http.post("/relay/pins", json={"prompt_token_ids": tokens(18), "id": "a"})
    assert (again.status_code, again.json()) == (201, entry)
    assert http.get("/relay/pins").json() == {"pins": [entry]}
    assert http.delete("/relay/pins/a").status_code == 204
    assert http.get("/relay/pins").json() == {"pins": []}
    assert http.delete("/relay/pins/a").status_code == 404


def test_the_same_prompt_has_the_same_id() -> None:
    http = client(Engine())
    first, second = (http.post("/relay/pins", json={"text": "x" * 17}).json() for _ in range(2))
    assert first == second
    assert first["tokens"] == 16


def test_messages_are_pinned_as_the_chat_template_renders_them() -> None:
    engine = Engine()
    messages = [{"role": "system", "content": "be brief"}]
    body = {"messages": messages, "id": "a"}
    made = client(engine).post("/relay/pins", json=body).json()
    assert made["tokens"] == len("<system>be brief<user>") // 4 * 4
    engine.scheduler.flood()
    prompt = list(map(ord, "<system>be brief<user>hello"))
    assert engine.scheduler.run(prompt) == made["tokens"]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ("nonsense", 400, "Invalid JSON"),
        ({}, 400, "expected one of text, messages, prompt_token_ids, relay and node"),
        ({"text": "a", "relay": {"prompt": "x", "schema": "s"}}, 400, "expected one of text"),
        ({"relay": {"prompt": "x"}}, 400, "expected the name of a schema"),
        ({"relay": {"prompt": "x", "schema": "s"}}, 501, "prompt modules: "),
        ({"text": "a", "messages": []}, 400, "expected one of text, messages"),
        ({"text": "a", "ttl": 3}, 400, "ttl: Extra inputs"),
        ({"text": "a" * 17, "ttl_s": 0}, 400, "ttl_s: Input should be greater than 0"),
        ({"text": "a" * 17, "ttl_s": "3"}, 400, "ttl_s: Input should be a valid number"),
        ({"text": "a" * 17, "id": 3}, 400, "id: Input should be a valid string"),
        ({"text": "a" * 17, "id": ""}, 400, "id: given '', expected 1 to 128 of the letters"),
        ({"text": "a", "id": "../a"}, 400, "id: given '../a', expected 1 to 128 of the letters"),
        ({"prompt_token_ids": [1, -1]}, 400, "prompt_token_ids.1: Input should be greater"),
        ({"prompt_token_ids": [1.5]}, 400, "prompt_token_ids.0: Input should be a valid integer"),
        ({"prompt_token_ids": []}, 400, "a prompt of 0 tokens was given"),
        ({"text": "a"}, 400, "a prompt of 1 tokens was given"),
        ({"text": "a" * 50}, 400, "expected fewer than max_model_len=40"),
        ({"messages": []}, 400, "messages: an empty list was given"),
        ({"messages": [{"role": "user"}]}, 400, "expected a text as content"),
        ({"messages": [{"role": "tool", "content": "a"}]}, 400, "no tools here"),
        ({"prompt_token_ids": tokens(16, first=9), "id": "taken"}, 409, "has another prompt"),
        ({"prompt_token_ids": tokens(32, first=9)}, 507, "the longest request"),
    ],
)
def test_refusals(body: Any, status: int, message: str) -> None:
    engine = Engine()
    http = client(engine)
    for name, first in (("taken", 100), ("other", 200)):
        made = {"prompt_token_ids": tokens(32, first=first), "id": name}
        assert http.post("/relay/pins", json=made).status_code == 201
    sent = {"content": body} if isinstance(body, str) else {"json": body}
    answer = http.post("/relay/pins", **sent)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, status)
    assert message in error["message"]
    assert len(http.get("/relay/pins").json()["pins"]) == 2


def test_a_prompt_with_modules_has_no_longer_body_than_may_be() -> None:
    body = {"relay": {"schema": "s", "prompt": "x" * 1000}}
    response = client(Engine(max_markup_bytes=1000)).post("/relay/pins", json=body)
    assert response.status_code == 413
    assert "more than 1000 bytes" in response.json()["error"]["message"]


def test_prompt_the_engine_refuses_leaves_no_pin() -> None:
    engine = Engine()
    engine.fails = ValueError("token id 9 is out of vocabulary")
    http = client(engine)
    answer = http.post("/relay/pins", json={"prompt_token_ids": tokens(16)})
    assert answer.status_code == 400
    assert "out of vocabulary" in answer.json()["error"]["message"]
    assert http.get("/relay/pins").json() == {"pins": []}


def test_a_pin_that_exists_stays_when_it_cannot_be_computed_again() -> None:
    engine = Engine()
    http = client(engine)
    body = {"prompt_token_ids": tokens(16), "id": "a"}
    http.post("/relay/pins", json=body)
    engine.scheduler.reset()
    engine.fails = ValueError("not now")
    assert http.post("/relay/pins", json=body).status_code == 400
    assert not http.get("/relay/pins").json()["pins"][0]["resident"]
    engine.fails = None
    assert http.post("/relay/pins", json=body).json()["resident"]


def test_without_the_relay_scheduler() -> None:
    http = client(Engine(scheduler=False))
    answers = [
        http.get("/relay/pins"),
        http.post("/relay/pins", json={"prompt_token_ids": tokens(16)}),
        http.delete("/relay/pins/a"),
    ]
    for answer in answers:
        assert answer.status_code == 501
        assert "--additional-config.relay.scheduler true" in answer.json()["error"]["message"]


BODY = {"prompt_token_ids": tokens(16), "id": "a"}


def test_every_rank_pins() -> None:
    engine = Engine(ranks=3, system_prompts=["be brief and kind"])
    http = client(engine)
    made = http.post("/relay/pins", json=BODY).json()
    assert [(each["rank"], each["resident"], each["blocks"]) for each in made["ranks"]] == [
        (rank, True, 4) for rank in range(3)
    ]
    assert made["resident"] and made["blocks"] == 4
    assert [each["id"] for each in http.get("/relay/pins").json()["pins"]] == ["system-0", "a"]
    for scheduler in engine.schedulers:
        scheduler.flood()
        assert scheduler.run(tokens(18)) == 16
    assert http.delete("/relay/pins/a").status_code == 204
    assert [len(each.pins.entries()) for each in engine.schedulers] == [1, 1, 1]
    assert http.delete("/relay/pins/a").status_code == 404


def test_a_rank_that_fails_is_named_and_the_others_keep_what_they_have() -> None:
    engine = Engine(ranks=2)
    engine.fails, engine.failing_rank = ValueError("not now"), 1
    http = client(engine)
    answer = http.post("/relay/pins", json=BODY)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message.startswith("pin 'a' is pinned in rank 0, where it stays; rank 1: ")
    assert "not now" in message
    [entry] = http.get("/relay/pins").json()["pins"]
    assert not entry["resident"]
    assert [each["problem"] for each in entry["ranks"]] == [None, "not pinned in this rank"]
    engine.fails = None
    assert http.post("/relay/pins", json=BODY).json()["resident"]
    # one that is in some ranks only goes from these
    engine.schedulers[0].pins.unpin("a")
    assert http.delete("/relay/pins/a").status_code == 204


def test_what_the_configuration_pinned_is_not_changed_through_http() -> None:
    engine = Engine(system_prompts=["be brief and kind"])
    http = client(engine)
    [entry] = http.get("/relay/pins").json()["pins"]
    assert entry["owner"] == "configuration"
    refused = http.delete("/relay/pins/system-0")
    assert refused.status_code == 403
    assert "change additional_config.relay.system_prompts" in refused.json()["error"]["message"]
    messages = [{"role": "system", "content": "be brief and kind"}]
    same = {"id": "system-0", "messages": messages}
    assert http.post("/relay/pins", json={**same, "ttl_s": 1}).status_code == 403
    # to compute it again after a reset takes nothing from anybody
    engine.scheduler.reset()
    assert http.post("/relay/pins", json=same).json() == entry
    assert http.get("/relay/pins").json() == {"pins": [entry]}


def test_pins_belong_to_the_key_that_made_them() -> None:
    http = client(Engine(), "first", "second")
    others = {"Authorization": "Bearer second"}
    assert http.post("/relay/pins", json=BODY).json()["owner"] == "api-key-0"
    refused = http.delete("/relay/pins/a", headers=others)
    assert refused.status_code == 403
    assert "belongs to api-key-0, not to api-key-1" in refused.json()["error"]["message"]
    assert http.post("/relay/pins", json=BODY, headers=others).json()["owner"] == "api-key-0"
    assert http.post("/relay/pins", json={**BODY, "ttl_s": 9}, headers=others).status_code == 403
    assert http.delete("/relay/pins/a").status_code == 204


def test_a_pin_ends_when_its_time_is_up() -> None:
    engine = Engine()
    http = client(engine)
    assert http.post("/relay/pins", json={**BODY, "ttl_s": 5}).json()["expires_in_s"] == 5
    engine.scheduler.now_s = 4.0
    assert http.get("/relay/pins").json()["pins"][0]["expires_in_s"] == 1
    assert http.post("/relay/pins", json={**BODY, "ttl_s": 5}).json()["expires_in_s"] == 5
    engine.scheduler.now_s = 9.0
    assert http.get("/relay/pins").json() == {"pins": []}
    assert engine.scheduler.num_free == 30


def test_all_callers_together_pin_no_more_than_a_share_of_the_cache() -> None:
    engine = Engine(max_pinned_fraction=0.5)  # 15 of 30 blocks
    http = client(engine)
    bodies = [{"prompt_token_ids": tokens(8, first=10 * i)} for i in range(1, 31)]
    answers = [http.post("/relay/pins", json=body) for body in bodies]
    assert [answer.status_code for answer in answers] == [201] * 7 + [507] * 23
    assert engine.scheduler.pins.num_blocks == 14
    message = answers[-1].json()["error"]["message"]
    assert "needs 2 KV blocks; of 30, 14 are pinned, and pins may take 15" in message
    assert "raise additional_config.relay.max_pinned_fraction" in message


def test_a_pin_of_whoever_uses_the_engine_in_its_process() -> None:
    engine = Engine()
    pin = asyncio.run(pin_tokens_async(engine, Declaration(tokens(16), "a")))
    assert pin.owner == "python"
    assert client(engine).delete("/relay/pins/a").status_code == 403


def test_an_engine_that_ends_while_it_computes_a_pin_says_so_itself() -> None:
    class EndedError(Exception):
        pass

    class Ending(Engine):
        async def generate(self, *args: Any, **kwargs: Any) -> AsyncIterator[None]:
            self.schedulers.clear()
            raise EndedError("the server is shutting down")
            yield None

        async def call_utility_all_async(self, method: str, *args: Any) -> list[Any]:
            if not self.schedulers:
                raise RuntimeError("the engine core is dead")
            return await super().call_utility_all_async(method, *args)

    with pytest.raises(EndedError, match="shutting down"):
        asyncio.run(pin_tokens_async(Ending(), Declaration(tokens(16), "a")))


def test_system_prompts_are_pinned_before_the_server_listens() -> None:
    engine = Engine(system_prompts=["be brief and kind"])
    [entry] = client(engine).get("/relay/pins").json()["pins"]
    assert entry["id"] == "system-0"
    assert entry["tokens"] == len("<system>be brief and kind<user>") // 4 * 4


def test_system_prompt_that_cannot_be_pinned_stops_the_start() -> None:
    engine = Engine(system_prompts=["be brief", "x" * 50])
    message = r"additional_config\.relay\.system_prompts\[1\]: a prompt of 64 tokens was given"
    with pytest.raises(ValueError, match=message):
        asyncio.run(pin_system_prompts_async(engine, OnlineRenderer()))


def test_pinned_system_prompts_are_logged_with_shared_blocks_counted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[str] = []
    logger = logging.getLogger("vllm.relay")
    monkeypatch.setattr(logger, "info", lambda line, *args: lines.append(line % args))
    client(Engine())
    assert lines == []
    client(Engine(system_prompts=["be brief", "be brief and kind"]))
    # "<system>be brief" is 16 tokens, which the second prompt begins with
    assert lines[0].endswith("system_prompts[0]: computing 22 tokens")
    assert lines[1].startswith("vllm-relay: additional_config.relay.system_prompts[0]: done in ")
    assert lines[4:] == [
        "vllm-relay: pinned system prompts: 2, tokens: 48, KV blocks: 8, "
        f"bytes in one worker: {8 * BLOCK_BYTES:,}"
    ]


def test_system_prompts_are_pinned_though_who_asked_first_is_cancelled() -> None:
    engine = Engine(system_prompts=["be brief"])
    cancel_the_first_of_two(engine, pin_system_prompts_async, OnlineRenderer())
    [entry] = engine.scheduler.pins.entries()
    assert entry["resident"]


def test_what_is_prepared_does_not_wait_for_what_else_is() -> None:
    engine = SimpleNamespace()

    async def prepare_async() -> None:
        await once(engine, "pinning", compute)
        await once(engine, "preloading", compute)

    async def compute() -> None:
        # requests of several ranks, each of which is prepared like any other
        await asyncio.gather(prepare_async(), prepare_async())

    asyncio.run(asyncio.wait_for(prepare_async(), timeout=10))


def test_metrics_are_true_when_they_are_read() -> None:
    engine = Engine(ranks=2)
    engine.vllm_config.attention_config = SimpleNamespace(backend=None, backend_per_kind={})
    engine.vllm_config.speculative_config = None
    engine.vllm_config.model_config = SimpleNamespace(served_model_name="tiny")
    RelayStatLogger(engine.vllm_config, [0, 1])

    async def read() -> dict[str, float]:
        seen: dict[str, float] = {}

        async def page(scope: Any, receive: Any, send: Any) -> None:
            found = [each for each in snapshot() if each.name == "relay:pinned_blocks"]
            seen.update({each.labels["engine"]: each.value for each in found})

        app = FastAPI()
        app.state.engine_client = engine
        scope = {"type": "http", "path": "/api/metrics", "root_path": "/api", "app": app}
        endpoints = FreshMetrics(refresh_async)
        endpoints.attach_router(app)
        [added] = app.user_middleware
        await added.cls(page, **added.kwargs)(scope, None, None)
        return seen

    asyncio.run(pin_tokens_async(engine, Declaration(tokens(16), "a")))
    assert asyncio.run(read()) == {"0": 4, "1": 4}
    engine.schedulers[1].pins.unpin("a")
    assert asyncio.run(read()) == {"0": 4, "1": 0}

    async def dies(*args: Any) -> Any:
        raise RuntimeError("the engine is dead")

    engine.call_utility_all_async = dies
    assert asyncio.run(read()) == {"0": 4, "1": 0}


def test_without_its_system_prompt_an_async_engine_takes_no_request() -> None:
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.async_llm import AsyncLLM

    wiring.prepare_new_engines()
    engine: Any = Engine(system_prompts=["x" * 50])

    async def ask() -> None:
        with pytest.raises(ValueError):
            await pin_system_prompts_async(engine, OnlineRenderer())
        for _ in range(2):
            message = r"additional_config\.relay\.system_prompts\[0\]: a prompt of 64 tokens"
            with pytest.raises(VLLMValidationError, match=message):
                await AsyncLLM.add_request(engine, "a", {"prompt_token_ids": [1]}, None)

    asyncio.run(ask())


def test_server_gets_the_routes_and_guards_them() -> None:
    from vllm import plugins
    from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

    wiring.serve_endpoints()
    assert not plugins.load_endpoint_plugins(("render",))
    app = server(["secret"])
    app.add_middleware(AuthenticationMiddleware, tokens=["secret"])
    http = TestClient(app)
    assert http.get("/relay/pins").status_code == 401
    assert http.delete("/relay/pins/a").status_code == 401
    assert http.get("/relay/contexts").status_code == 401
    headers = {"Authorization": "Bearer secret"}
    assert http.get("/relay/pins", headers=headers).json() == {"pins": []}


def server(keys: list[str] | None, root_path: str = "", **options: Any) -> FastAPI:
    """As vLLM makes one, with all endpoints of relay."""
    from vllm import plugins

    wiring.serve_endpoints()
    app = FastAPI()
    app.root_path = root_path
    app.state.args = Namespace(api_key=keys, additional_config={"relay": options})
    for endpoints in plugins.load_endpoint_plugins(("generate",)):
        endpoints.attach_router(app)
    app.state.engine_client, app.state.online_renderer = Engine(), OnlineRenderer()
    return app


@pytest.mark.parametrize("root_path", ["", "/api", "/api/", "/", "/re", "/relay"])
def test_no_root_path_leads_around_the_key(root_path: str) -> None:
    from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

    app = server(["secret"], root_path)
    app.add_middleware(AuthenticationMiddleware, tokens=["secret"])
    http = TestClient(app)
    answers = {
        (prefix, key): http.post(
            f"{prefix}/relay/pins", json=BODY, headers={"Authorization": f"Bearer {key}"}
        ).status_code
        for prefix in ("", root_path.rstrip("/"))
        for key in ("secret", "wrong", "")
    }
    for (_, key), status in answers.items():
        assert status in ((201, 404) if key == "secret" else (401, 404))
    if root_path in ("", "/api"):
        assert set(answers.values()) == {201, 401}


CHANGES = [
    ("POST", "/relay/pins"),
    ("DELETE", "/relay/pins/a"),
    ("POST", "/relay/contexts"),
    ("DELETE", "/relay/contexts/a"),
    ("POST", "/relay/schemas"),
    ("DELETE", "/relay/schemas/a"),
]


@pytest.mark.parametrize(("method", "path"), CHANGES)
def test_without_an_api_key_nothing_is_changed(
    method: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    http = TestClient(server(None))
    assert http.get("/relay/pins").status_code == 200
    refused = http.request(method, path, json=BODY)
    assert refused.status_code == 403
    assert "start it with --api-key" in refused.json()["error"]["message"]
    monkeypatch.setenv("VLLM_API_KEY", "of the environment")
    assert http.request(method, path, json=BODY).status_code == 401


def test_an_option_opens_the_routes() -> None:
    http = TestClient(server(None, routes="open"))
    made = http.post("/relay/pins", json=BODY)
    assert (made.status_code, made.json()["owner"]) == (201, "http")
    # it opens none where there is a key
    assert TestClient(server(["secret"], routes="open")).get("/relay/pins").status_code == 401


def test_an_option_turns_all_routes_off() -> None:
    http = TestClient(server(["secret"], routes="off"))
    headers = {"Authorization": "Bearer secret"}
    for method, path in [*CHANGES, ("GET", "/relay/pins")]:
        assert http.request(method, path, json=BODY, headers=headers).status_code == 404
