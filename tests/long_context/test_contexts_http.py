# SPDX-License-Identifier: Apache-2.0
"""The routes for contexts, on an engine without a model."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from vllm.v1.request import RequestStatus

from tests.long_context.context_engine import (
    GRANULE_BYTES,
    Engine,
    OnlineRenderer,
    chat,
    letters,
    tokens,
)
from vllm_relay.long_context.orders import KEEP_ARG
from vllm_relay.serving.contexts import ContextEndpoints, check_keeping
from vllm_relay.sparse.contexts.context_store import context_id_of


def client(engine: Engine, api_key: list[str] | None = None) -> TestClient:
    app = FastAPI()
    app.state.args = Namespace(api_key=["secret"] if api_key is None else api_key)
    endpoints = ContextEndpoints()
    endpoints.attach_router(app)
    app.state.engine_client, app.state.online_renderer = engine, OnlineRenderer()
    asyncio.run(endpoints.init_state(engine, app.state, app.state.args))
    return TestClient(app, headers={"Authorization": "Bearer secret"})


def test_contexts_come_and_go() -> None:
    engine = Engine()
    http = client(engine)
    made = http.post("/relay/contexts", json={"prompt_token_ids": tokens(90)})
    assert made.status_code == 201
    context_id = context_id_of(tokens(90))
    entry = {
        "context_id": context_id,
        "num_tokens": 90,
        "state": "indexing",
        "memory_bytes": GRANULE_BYTES,
        "file_bytes": 0,
        "problem": None,
        "parent_id": None,
        "num_own_tokens": 90,
    }
    assert made.json() == entry
    assert http.get("/relay/contexts").json() == {"contexts": [entry]}
    gauges = engine.call_utility("relay_command", "context_gauges", {})["result"]
    assert (gauges["contexts"], gauges["host_kv_bytes"]) == (1, GRANULE_BYTES)
    engine.core.workers[0].build_indexes()
    assert http.get("/relay/contexts").json() == {"contexts": [{**entry, "state": "memory"}]}
    deleted = http.delete(f"/relay/contexts/{context_id}")
    assert (deleted.status_code, deleted.content) == (204, b"")
    assert http.get("/relay/contexts").json() == {"contexts": []}
    assert engine.core.workers[0].contexts == {}
    gauges = engine.call_utility("relay_command", "context_gauges", {})["result"]
    assert (gauges["contexts"], gauges["host_kv_bytes"]) == (0, 0)
    again = http.delete(f"/relay/contexts/{context_id}")
    assert again.status_code == 404
    assert again.json()["error"]["type"] == "NotFoundError"
    assert f"there is no context '{context_id}'" in again.json()["error"]["message"]


def test_a_context_that_is_there_is_not_computed_again() -> None:
    engine = Engine()
    http = client(engine)
    first, second = (http.post("/relay/contexts", json={"text": "x" * 60}) for _ in range(2))
    assert (first.status_code, second.status_code) == (201, 201)
    assert first.json() == second.json()
    assert engine.prompts == [letters("x" * 60)]


@pytest.mark.parametrize(
    ("body", "token_ids"),
    [
        ({"text": "y" * 70}, letters("y" * 70)),
        ({"prompt_token_ids": tokens(55, first=3)}, tokens(55, first=3)),
        (
            {"messages": [{"role": "system", "content": "be kind " * 9}]},
            # every conversation goes on with the user's turn
            [*chat([{"role": "system", "content": "be kind " * 9}]), *letters("<user>")],
        ),
    ],
    ids=["text", "token_ids", "messages"],
)
def test_prompts_of_all_forms(body: Any, token_ids: list[int]) -> None:
    engine = Engine()
    made = client(engine).post("/relay/contexts", json=body)
    assert made.status_code == 201
    assert made.json()["num_tokens"] == len(token_ids)
    assert engine.prompts == [token_ids]
    assert engine.ask([*token_ids[:-3], 900, 901]) == len(token_ids) - 3


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ("nonsense", 400, "Invalid JSON"),
        ({}, 400, "expected one of text, messages and prompt_token_ids"),
        ({"text": "a", "messages": []}, 400, "expected one of text, messages"),
        ({"text": "a" * 60, "id": "mine"}, 400, "id: Extra inputs"),
        ({"prompt_token_ids": [1, -1]}, 400, "prompt_token_ids.1: Input should be greater"),
        ({"prompt_token_ids": [1.5]}, 400, "prompt_token_ids.0: Input should be a valid integer"),
        ({"prompt_token_ids": []}, 400, "a prompt of 0 tokens was given, expected at least"),
        ({"text": "a" * 49}, 400, "a prompt of 49 tokens was given, expected at least min_context"),
        ({"text": "a" * 400}, 400, "400 tokens was given, expected fewer than max_model_len=400"),
        ({"messages": []}, 400, "messages: an empty list was given"),
        ({"messages": [{"role": "user"}]}, 400, "expected a text as content"),
        ({"messages": [{"role": "tool", "content": "a"}]}, 400, "no tools here"),
        ({"prompt_token_ids": tokens(60, first=9)}, 507, "0 are left beside the longest request"),
    ],
)
def test_refusals(body: Any, status: int, message: str) -> None:
    engine = Engine(host_granules=3)
    http = client(engine)
    for first in (100, 200):
        made = http.post("/relay/contexts", json={"prompt_token_ids": tokens(60, first=first)})
        assert made.status_code == 201
    sent = {"content": body} if isinstance(body, str) else {"json": body}
    answer = http.post("/relay/contexts", **sent)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, status)
    assert error["type"] == {400: "BadRequestError", 507: "InsufficientStorageError"}[status]
    assert message in error["message"]
    assert len(engine.prompts) == 2  # nothing was computed in vain
    assert len(http.get("/relay/contexts").json()["contexts"]) == 2


def test_a_deleted_context_makes_room() -> None:
    http = client(Engine(host_granules=2))
    body = {"prompt_token_ids": tokens(60, first=9)}
    made = http.post("/relay/contexts", json={"prompt_token_ids": tokens(60)}).json()
    assert http.post("/relay/contexts", json=body).status_code == 507
    assert http.delete(f"/relay/contexts/{made['context_id']}").status_code == 204
    assert http.post("/relay/contexts", json=body).status_code == 201


def test_a_context_whose_file_cannot_be_deleted_stays_what_it_was() -> None:
    engine = Engine(context_dir="contexts")
    http = client(engine)
    body = {"prompt_token_ids": tokens(60)}
    path = f"/relay/contexts/{http.post('/relay/contexts', json=body).json()['context_id']}"
    [worker] = engine.core.workers
    worker.build_indexes()
    [entry] = http.get("/relay/contexts").json()["contexts"]
    worker.deletion_problem = "cannot be deleted: [Errno 30] Read-only file system"
    for _ in range(2):
        refused = http.delete(path)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (500, 500)
        assert error["type"] == "InternalServerError"
        assert error["message"].endswith("Read-only file system")
        # it is used as before, listed or not
        engine.core.blocks.manager.reset_prefix_cache()
        assert engine.ask([*tokens(60), 900]) == 60
    entry["problem"] = worker.deletion_problem
    assert http.get("/relay/contexts").json() == {"contexts": [entry]}
    assert http.post("/relay/contexts", json=body).json() == entry
    assert engine.prompts == [tokens(60)]
    worker.deletion_problem = None
    assert http.delete(path).status_code == 204
    assert http.get("/relay/contexts").json() == {"contexts": []}
    assert http.delete(path).status_code == 404


def test_a_context_that_only_one_rank_could_delete_is_not_used_any_more() -> None:
    engine = Engine(context_dir="contexts", num_ranks=2)
    http = client(engine)
    body = {"prompt_token_ids": tokens(60)}
    path = f"/relay/contexts/{http.post('/relay/contexts', json=body).json()['context_id']}"
    for worker in engine.core.workers:
        worker.build_indexes()
    engine.core.workers[0].deletion_problem = "cannot be deleted: [Errno 13] Permission denied"
    assert http.delete(path).status_code == 500
    engine.core.blocks.manager.reset_prefix_cache()
    assert engine.ask([*tokens(60), 900]) == 0
    assert http.get("/relay/contexts").json() == {"contexts": []}


def test_an_aborted_request_leaves_no_context() -> None:
    engine = Engine()
    engine.status = RequestStatus.FINISHED_ABORTED
    http = client(engine)
    answer = http.post("/relay/contexts", json={"prompt_token_ids": tokens(60)})
    assert answer.status_code == 409
    assert answer.json()["error"]["type"] == "ConflictError"
    assert "ended before all of it was computed: try again" in answer.json()["error"]["message"]
    assert http.get("/relay/contexts").json() == {"contexts": []}
    engine.status = RequestStatus.FINISHED_LENGTH_CAPPED
    made = http.post("/relay/contexts", json={"prompt_token_ids": tokens(60)})
    assert made.status_code == 201


def test_a_prompt_that_the_engine_refuses_is_a_bad_request() -> None:
    engine = Engine()
    engine.fails = ValueError("token id 900 is out of vocabulary")
    http = client(engine)
    answer = http.post("/relay/contexts", json={"prompt_token_ids": tokens(60)})
    assert answer.status_code == 400
    message = "vLLM does not take these tokens: token id 900 is out of vocabulary"
    assert answer.json()["error"]["message"] == message
    assert http.get("/relay/contexts").json() == {"contexts": []}


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ({"backend": "RELAY"}, "start vLLM with --attention-backend relay_sparse"),
        ({"engines": 2}, "--data-parallel-size is 2"),
    ],
    ids=["backend", "engines"],
)
def test_engines_without_contexts(engine: dict[str, Any], reason: str) -> None:
    http = client(Engine(**engine))
    answers = [
        http.get("/relay/contexts"),
        http.post("/relay/contexts", json={"prompt_token_ids": tokens(60)}),
        http.delete("/relay/contexts/a"),
    ]
    for answer in answers:
        assert answer.status_code == 501
        assert answer.json()["error"]["type"] == "NotImplementedError"
        assert reason in answer.json()["error"]["message"]


def test_without_prefix_caching_none_is_kept() -> None:
    http = client(Engine(enable_caching=False))
    answer = http.post("/relay/contexts", json={"prompt_token_ids": tokens(60)})
    assert answer.status_code == 501
    assert "only with prefix caching" in answer.json()["error"]["message"]
    assert http.get("/relay/contexts").json() == {"contexts": []}


def test_configured_contexts_are_computed_before_the_server_listens() -> None:
    engine = Engine(contexts=["be brief " * 9])
    [entry] = client(engine).get("/relay/contexts").json()["contexts"]
    wanted = [*chat([{"role": "system", "content": "be brief " * 9}]), *letters("<user>")]
    assert entry["num_tokens"] == len(wanted)
    assert engine.prompts == [wanted]


def test_a_configured_context_is_not_deleted_through_http() -> None:
    http = client(Engine(contexts=["be brief " * 9]))
    [entry] = http.get("/relay/contexts").json()["contexts"]
    refused = http.delete(f"/relay/contexts/{entry['context_id']}")
    assert refused.status_code == 403
    assert "change additional_config.relay.contexts" in refused.json()["error"]["message"]
    assert http.get("/relay/contexts").json()["contexts"] == [entry]
    assert http.delete("/relay/contexts/other").status_code == 404


def test_other_engines_start_without_configured_contexts() -> None:
    engine = Engine(backend="RELAY", contexts=["be brief " * 9])
    client(engine)
    assert engine.prompts == []
    asyncio.run(ContextEndpoints().init_state(None, None, Namespace()))  # a server that renders


@pytest.mark.parametrize(
    ("options", "api_key", "reason"),
    [
        ({}, ["secret"], None),
        ({}, [], "start the server with --api-key"),
        ({"client_contexts": "open"}, [], None),
        ({"client_contexts": "off"}, ["secret"], "client_contexts=off keeps no requests"),
    ],
    ids=["key", "no_key", "open", "off"],
)
def test_requests_that_ask_to_be_kept(
    options: dict[str, Any], api_key: list[str], reason: str | None
) -> None:
    engine = Engine(**options)
    http = client(engine, api_key)
    renderer = http.app.state.online_renderer  # type: ignore[attr-defined]
    keeps = Namespace(vllm_xargs={KEEP_ARG: 1})
    for other in (Namespace(vllm_xargs=None), Namespace(), Namespace(vllm_xargs={KEEP_ARG: 0})):
        check_keeping(renderer, other)
    if reason is None:
        check_keeping(renderer, keeps)
    else:
        with pytest.raises(ValueError, match=reason):
            check_keeping(renderer, keeps)
    # however it got past the front end
    params = SimpleNamespace(
        max_tokens=1, extra_args={KEEP_ARG: 1}, skip_reading_prefix_cache=False
    )
    engine.core.run(tokens(60), params, RequestStatus.FINISHED_STOPPED)
    assert len(http.get("/relay/contexts").json()["contexts"]) == (reason is None)


def test_off_leaves_the_routes_as_they_are() -> None:
    http = client(Engine(client_contexts="off"))
    made = http.post("/relay/contexts", json={"prompt_token_ids": tokens(60)})
    assert made.status_code == 201
    assert len(http.get("/relay/contexts").json()["contexts"]) == 1
