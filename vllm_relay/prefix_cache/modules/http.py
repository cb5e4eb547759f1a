# SPDX-License-Identifier: Apache-2.0
"""The server's routes for schemas of prompt modules, as an endpoint plug-in of vLLM."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response

from vllm_relay.config import RelayConfig
from vllm_relay.prefix_cache.http import error_response
from vllm_relay.prefix_cache.modules.describe import describe_schema
from vllm_relay.prefix_cache.modules.online import (
    FIELD,
    STAND_IN_PROMPT,
    keep_store,
    store_of,
)
from vllm_relay.prefix_cache.modules.pml import parse_schema
from vllm_relay.prefix_cache.modules.requests import unsupported_reason
from vllm_relay.prefix_cache.modules.schema_store import SchemaStore

if TYPE_CHECKING:
    from argparse import Namespace

    from starlette.datastructures import State
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger("vllm.relay")


class SchemaEndpoints:
    """Implements vLLM's EndpointPlugin."""

    name = "relay-schemas"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        app.include_router(_router())
        app.add_middleware(FillEmptyPrompts)

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        """Read the configured schemas; the server is not listening yet.

        Raises:
            ValueError: one cannot be understood.
        """
        if engine_client is None:
            return
        config, renderer = engine_client.vllm_config, state.online_renderer
        if reason := unsupported_reason(config):
            keep_store(renderer, reason)
            return
        store = SchemaStore(
            engine_client.renderer.get_tokenizer(),
            block_size=config.cache_config.block_size,
            max_model_len=config.model_config.max_model_len,
            chat_template=renderer.chat_template,
            chat_template_kwargs=renderer.default_chat_template_kwargs,
        )
        for path in RelayConfig.from_vllm_config(config).schemas:
            store.add(Path(path))
        if names := store.names():
            logger.info("vllm-relay: schemas of prompt modules: %s", ", ".join(names))
        keep_store(renderer, store)


class FillEmptyPrompts:
    """Lets requests with the field `relay` leave out `prompt` and `messages`, which vLLM wants."""

    _FIELDS: ClassVar[dict[str, tuple[str, Any]]] = {
        "/v1/completions": ("prompt", STAND_IN_PROMPT),
        "/v1/chat/completions": ("messages", []),
    }

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] != "http"
            or scope["method"] != "POST"
            or scope["path"] not in self._FIELDS
        ):
            await self._app(scope, receive, send)
            return
        messages: list[Message] = []
        while not messages or messages[-1].get("more_body"):
            messages.append(await receive())
            if messages[-1]["type"] != "http.request":
                break
        body = b"".join(each.get("body", b"") for each in messages)
        if f'"{FIELD}"'.encode() in body:
            body = _with_field(body, *self._FIELDS[scope["path"]])
            headers = [each for each in scope["headers"] if each[0] != b"content-length"]
            scope["headers"] = [*headers, (b"content-length", str(len(body)).encode())]
            messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again() -> Message:
            return messages.pop(0) if messages else await receive()

        await self._app(scope, receive_again, send)


def _with_field(body: bytes, field: str, value: Any) -> bytes:
    try:
        request = json.loads(body)
    except ValueError:
        return body  # vLLM says what is wrong
    if not isinstance(request, dict) or request.get(FIELD) is None:
        return body
    if request.get(field) is not None:
        return body
    return json.dumps({**request, field: value}).encode()


def _store(raw_request: Request) -> SchemaStore:
    try:
        return store_of(raw_request.app.state.online_renderer)
    except ValueError as error:
        raise HTTPException(501, str(error)) from None


Store = Annotated[SchemaStore, Depends(_store)]


def _router() -> APIRouter:
    router = APIRouter(prefix="/relay", tags=["relay"])

    @router.post("/schemas", status_code=201)
    async def add(raw_request: Request, store: Store) -> Response:
        """Add a schema, or take the place of the one with its name; the body is PML."""
        try:
            text = (await raw_request.body()).decode()
            # long ones must not keep others waiting
            schema = await asyncio.to_thread(lambda: store.add(parse_schema(text)))
        except ValueError as error:
            return error_response(400, str(error))
        return JSONResponse(describe_schema(schema, store.block_size), 201)

    @router.get("/schemas")
    async def schemas(store: Store) -> Response:
        """The names of all schemas."""
        return JSONResponse({"schemas": store.names()})

    @router.get("/schemas/{name}")
    async def schema(name: str, store: Store) -> Response:
        """The layout of a schema."""
        if name not in store:
            return error_response(404, store.unknown(name))
        return JSONResponse(describe_schema(store[name], store.block_size))

    @router.delete("/schemas/{name}", status_code=204)
    async def remove(name: str, store: Store) -> Response:
        """Forget a schema; what is computed of it is evicted when there is need."""
        if name not in store:
            return error_response(404, store.unknown(name))
        store.remove(name)
        return Response(status_code=204)

    return router
