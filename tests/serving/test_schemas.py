# SPDX-License-Identifier: Apache-2.0
"""The routes for schemas, and requests without prompts, on a server without a model."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import tracemalloc
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

from tests.modules.chat_templates import character_tokenizer
from tests.support.waiting import WAIT_S
from vllm_relay.commands.errors import CommandError
from vllm_relay.modules.markup.schema import Schema
from vllm_relay.modules.prompt.schema_store import SchemaStore
from vllm_relay.serving import schemas as routes
from vllm_relay.serving.modular_bodies import ModularBodies
from vllm_relay.serving.modular_requests import STAND_IN_PROMPT, store_of
from vllm_relay.serving.requests import route_path
from vllm_relay.serving.schemas import SchemaEndpoints


def client_of(
    monkeypatch: pytest.MonkeyPatch,
    *,
    schemas: tuple[str, ...] = (),
    reason: str | None = None,
    processes: int = 1,
    api_keys: tuple[str, ...] = ("secret",),
    **options: int,
) -> TestClient:
    monkeypatch.setattr(routes, "unsupported_reason", lambda config: reason)
    app = FastAPI()
    app.state.args = Namespace(api_key=list(api_keys))
    app.state.online_renderer = SimpleNamespace(
        chat_template=None, default_chat_template_kwargs=None
    )
    config = SimpleNamespace(
        additional_config={"relay": {"scheduler": True, "schemas": list(schemas), **options}},
        cache_config=SimpleNamespace(block_size=32),
        model_config=SimpleNamespace(max_model_len=512),
        parallel_config=SimpleNamespace(_api_process_count=processes),
    )
    renderer = SimpleNamespace(get_tokenizer=character_tokenizer)
    engine = SimpleNamespace(vllm_config=config, renderer=renderer)
    endpoints = SchemaEndpoints()
    endpoints.attach_router(app)
    asyncio.run(endpoints.init_state(engine, app.state, app.state.args))

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    @app.post("/v1/embeddings")
    @app.post("/v1/responses")
    async def echo(request: Request) -> Any:
        body = await request.body()
        assert request.headers["content-length"] == str(len(body))
        return body.decode()

    return TestClient(app, headers={"Authorization": "Bearer secret"})


def test_schemas_come_and_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "known.xml"
    path.write_text('<schema name="known"/>')
    client = client_of(monkeypatch, schemas=(str(path),))
    name = "trips & more?"
    added = client.post(
        "/relay/schemas", content='<schema name="trips &amp; more?"><module name="a">12</module>x'
        "</schema>"
    )  # fmt: skip
    assert added.status_code == 201
    assert client.get("/relay/schemas").json() == {"schemas": ["known", name]}
    page = client.get("/relay/schemas/trips%20%26%20more%3F")
    assert page.json() == added.json()
    assert page.json()["modules"][1] == {
        "module": "a",
        "position": 1,
        "positions": 2,
        "tokens": 2,
        "cached": True,
        "blocks": 1,
        "padding_tokens": 30,
        "parameters": {},
    }
    assert client.delete("/relay/schemas/trips%20%26%20more%3F").status_code == 204
    assert client.get("/relay/schemas/knwon").status_code == 404
    assert "did you mean known?" in client.delete("/relay/schemas/knwon").text


def test_configured_schemas_are_not_changed_through_http(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "known.xml"
    path.write_text('<schema name="known">text</schema>')
    client = client_of(monkeypatch, schemas=(str(path),))
    for refused in (
        client.post("/relay/schemas", content='<schema name="known"/>'),
        client.delete("/relay/schemas/known"),
    ):
        assert refused.status_code == 403
        assert "change additional_config.relay.schemas" in refused.json()["error"]["message"]
    assert client.get("/relay/schemas").json() == {"schemas": ["known"]}


def test_only_its_owner_changes_a_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_of(monkeypatch, api_keys=("secret", "other"))
    others = {"Authorization": "Bearer other"}
    assert client.post("/relay/schemas", content=TEXT.format("one")).status_code == 201
    for refused in (
        client.post("/relay/schemas", content=TEXT.format("two"), headers=others),
        client.delete("/relay/schemas/s", headers=others),
    ):
        assert refused.status_code == 403
        message = refused.json()["error"]["message"]
        assert message.startswith("schema 's' belongs to api-key-0, not to api-key-1")
    described = client.get("/relay/schemas/s", headers=others).json()
    assert (described["positions"], described["name"]) == (4, "s")  # it is there for all to use
    assert client.post("/relay/schemas", content=TEXT.format("three")).status_code == 201
    assert client.delete("/relay/schemas/s").status_code == 204
    assert (
        client.post("/relay/schemas", content=TEXT.format("x"), headers=others).status_code == 201
    )
    assert client.delete("/relay/schemas/s").status_code == 403


def test_a_schema_is_its_first_owners_whoever_is_faster() -> None:
    """Both see that the name is free, and one is the first to take it."""
    free = threading.Barrier(2, timeout=WAIT_S)

    class Tokenizer:
        def __init__(self) -> None:
            self._tokenizer = character_tokenizer()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._tokenizer, name)

        def encode(self, text: str, **how: Any) -> list[int]:
            if text.startswith("wait"):
                free.wait()
            return self._tokenizer.encode(text, **how)

    store = SchemaStore(Tokenizer(), block_size=32)

    def add(owner: str) -> int:
        try:
            store.add(Schema("s", f"wait for the other of {owner}"), owner)
        except CommandError as error:
            return error.status
        return 201

    with ThreadPoolExecutor(2) as threads:
        assert sorted(threads.map(add, ("api-key-0", "api-key-1"))) == [201, 403]


TEXT = '<schema name="s">{}</schema>'


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"<schema name='a/b'/>", "schema:1:1: schema: given the name 'a/b', expected a segment"),
        (b"<schema name='a'><modul/></schema>", "schema:1:18: found <modul>"),
        (b"\xff", "can't decode byte"),
        (b"<schema name='s'><user>a</user></schema>", "the model has no chat template"),
    ],
)
def test_schemas_that_cannot_be_are_refused(
    monkeypatch: pytest.MonkeyPatch, body: bytes, message: str
) -> None:
    refused = client_of(monkeypatch).post("/relay/schemas", content=body)
    assert refused.status_code == 400
    assert message in refused.json()["error"]["message"]


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_a_server_that_cannot_use_modules_says_why(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    client = client_of(monkeypatch, reason="no such luck")
    url = "/relay/schemas/x" if method == "DELETE" else "/relay/schemas"
    refused = client.request(method, url)
    assert refused.status_code == 501
    assert "prompt modules: no such luck" in refused.text


def test_a_server_has_the_schemas_of_its_configuration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "schema.xml"
    path.write_text('<schema name="known"/>')
    client = client_of(monkeypatch, schemas=(str(path),))
    store = store_of(client.app.state.online_renderer)
    assert (store.names(), store.block_size, store.max_model_len) == (["known"], 32, 512)


@pytest.mark.parametrize(
    ("url", "body", "expected"),
    [
        ("completions", {"relay": {}}, {"relay": {}, "prompt": STAND_IN_PROMPT}),
        ("chat/completions", {"relay": {}}, {"relay": {}, "messages": []}),
        ("completions", {"relay": {}, "prompt": "x"}, {"relay": {}, "prompt": "x"}),
        ("completions", {"relay": {}, "prompt": None}, {"relay": {}, "prompt": STAND_IN_PROMPT}),
        ("completions", {"relay": None}, {"relay": None}),
        ("responses", {"input": '"relay"'}, {"input": '"relay"'}),
        ("completions", {"prompt": '"relay"'}, {"prompt": '"relay"'}),
        ("embeddings", {"relay": {}}, {"relay": {}}),
        ("completions", ["relay"], ["relay"]),
    ],
)
def test_prompts_may_be_left_out_beside_the_field(
    monkeypatch: pytest.MonkeyPatch, url: str, body: Any, expected: Any
) -> None:
    answer = client_of(monkeypatch).post(f"/v1/{url}", json=body)
    assert json.loads(answer.json()) == expected


def test_fields_that_would_be_ignored_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = client_of(monkeypatch).post("/v1/responses", json={"input": "x", "relay": {}})
    assert refused.status_code == 400
    assert "only /v1/completions and /v1/chat/completions" in refused.json()["error"]["message"]


@pytest.mark.parametrize(("method", "url"), [("POST", "schemas"), ("DELETE", "schemas/x")])
def test_schemas_that_other_processes_would_not_know_are_refused(
    monkeypatch: pytest.MonkeyPatch, method: str, url: str
) -> None:
    client = client_of(monkeypatch, processes=3)
    refused = client.request(method, f"/relay/{url}", content='<schema name="x"/>')
    assert refused.status_code == 501 and "the other 2 processes" in refused.text
    assert client.get("/relay/schemas").json() == {"schemas": []}


def test_what_is_no_json_is_left_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = client_of(monkeypatch).post("/v1/completions", content=b'{"relay":')
    assert answer.json() == '{"relay":'


def test_bodies_may_come_in_pieces() -> None:
    """And the connection may be closed between."""
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(await receive())
        seen.append(await receive())

    async def ask(*messages: dict[str, Any]) -> list[Any]:
        queue = [*messages, {"type": "http.disconnect"}]
        seen.clear()

        async def receive() -> Any:
            return queue.pop(0)

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        await ModularBodies(app, lambda: 1000)(scope, receive, None)
        return list(seen)

    def piece(body: bytes, more: bool) -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": more}

    whole, end = asyncio.run(ask(piece(b'{"rel', True), piece(b'ay": {}}', False)))
    assert json.loads(whole["body"]) == {"relay": {}, "prompt": STAND_IN_PROMPT}
    assert end["type"] == "http.disconnect"
    first, end = asyncio.run(ask(piece(b'{"rel', True)))
    assert (first["body"], end["type"]) == (b'{"rel', "http.disconnect")


@pytest.mark.parametrize(
    ("path", "root_path", "expected"),
    [
        ("/v1/completions", "", "/v1/completions"),
        ("/x/v1/completions", "/x", "/v1/completions"),
        ("/x/v1/completions", "/x/", "/v1/completions"),
        ("/v1/completions", "/v", "/v1/completions"),
        ("/v1/completions", "/", "/v1/completions"),
    ],
)
def test_paths_are_those_behind_the_prefix_of_a_proxy(
    path: str, root_path: str, expected: str
) -> None:
    assert route_path({"type": "http", "path": path, "root_path": root_path}) == expected
    assert route_path({"type": "lifespan"}) == ""


LONG = '<schema name="s">{}</schema>'.format(
    "".join(f'<param name="p{n}" len="65536"/>' for n in range(60))
)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (LONG, 422, "takes 65537 positions or more, the model has 512"),
        ('<schema name="s">' + "x" * 301 + "</schema>", 422, "takes more than 300 tokens"),
        ('<schema name="s">' + "x" * 250 + "</schema>", 409, "the others 101 of 300"),
        ('<schema name="s">' + "x" * 4000 + "</schema>", 413, "more than 3000 bytes"),
    ],
)
def test_what_there_is_no_room_for_is_refused(
    monkeypatch: pytest.MonkeyPatch, body: str, status: int, message: str
) -> None:
    client = client_of(monkeypatch, max_schema_tokens=300, max_markup_bytes=3000)
    first = client.post("/relay/schemas", content='<schema name="f">' + "x" * 100 + "</schema>")
    assert first.status_code == 201
    refused = client.post("/relay/schemas", content=body)
    assert refused.status_code == status and message in refused.text
    assert client.get("/relay/schemas").json() == {"schemas": ["f"]}


def test_there_are_so_many_schemas(monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_of(monkeypatch, max_schemas=2)
    statuses = [
        client.post("/relay/schemas", content=f'<schema name="{name}"/>').status_code
        for name in "abcba"
    ]
    assert statuses == [201, 201, 409, 201, 201]
    assert client.delete("/relay/schemas/a").status_code == 204
    assert client.post("/relay/schemas", content='<schema name="c"/>').status_code == 201


def test_bodies_are_read_as_far_as_they_may_be_long(monkeypatch: pytest.MonkeyPatch) -> None:
    read = 0

    def pieces() -> Iterator[bytes]:
        nonlocal read
        for _ in range(1000):
            read += 1
            yield b"x" * 1000

    client = client_of(monkeypatch, max_markup_bytes=3000)
    assert client.post("/relay/schemas", content=pieces()).status_code == 413
    body = json.dumps({"relay": {"prompt": "x" * 4000}})
    for url in ("completions", "chat/completions"):
        refused = client.post(f"/v1/{url}", content=body)
        assert refused.status_code == 413 and "more than 3000 bytes" in refused.text
    plain = client.post("/v1/completions", content=json.dumps({"prompt": "x" * 4000}))
    assert plain.status_code == 200


def test_few_schemas_are_added_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_of(monkeypatch)
    client.app.state.relay_num_posts = routes.MAX_POSTS
    refused = client.post("/relay/schemas", content='<schema name="s"/>')
    assert refused.status_code == 429 and "send it again later" in refused.text
    client.app.state.relay_num_posts = 0
    for _ in range(2 * routes.MAX_POSTS):
        assert client.post("/relay/schemas", content="<x/>").status_code == 400
    assert client.app.state.relay_num_posts == 0


def test_what_is_refused_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_of(monkeypatch, max_markup_bytes=1 << 18)
    bodies = [
        LONG,
        '<schema name="s">' + "<module" * 25_000,
        '<schema name="s">' + '<module name="a"/>' * 12_500 + "</schema>",
        '<schema name="s">' + "x" * (1 << 18),
        '<schema name="s">' + "& " * 100_000,
    ]

    def post_all() -> None:
        for body in bodies:
            assert client.post("/relay/schemas", content=body).status_code in (400, 413, 422)
        gc.collect()

    post_all()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        post_all()
        left = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert left < 250_000


def test_deep_bodies_are_left_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    body = '{"relay": ' + "[" * 100_000 + "]" * 100_000 + "}"
    assert client_of(monkeypatch).post("/v1/completions", content=body).json() == body


def test_clients_that_leave_before_all_is_sent_are_no_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor do they take the place of another who posts."""
    client = client_of(monkeypatch)
    messages = [
        {"type": "http.request", "body": b"<schema", "more_body": True},
        {"type": "http.disconnect"},
    ]
    scope = {
        **{"type": "http", "method": "POST", "path": "/relay/schemas", "query_string": b""},
        "headers": [(b"authorization", b"Bearer secret")],
    }
    sent: list[Any] = []

    async def leave() -> None:
        left = list(messages)

        async def receive() -> Any:
            return left.pop(0)

        async def send(message: Any) -> None:
            sent.append(message)

        await client.app(dict(scope), receive, send)

    for _ in range(2 * routes.MAX_POSTS):
        asyncio.run(leave())
    assert {each["status"] for each in sent if "status" in each} == {400}
    assert client.post("/relay/schemas", content='<schema name="s"/>').status_code == 201
