# SPDX-License-Identifier: Apache-2.0
"""The server's routes for schemas of prompt modules, as an endpoint plug-in of vLLM."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response

from vllm_relay.commands.errors import CommandError
from vllm_relay.commands.owners import CONFIGURATION
from vllm_relay.config import RelayConfig
from vllm_relay.modules.engine.requests import unsupported_reason
from vllm_relay.modules.markup.pml import parse_schema
from vllm_relay.modules.markup.schema import SchemaTooLongError, TooManySchemasError
from vllm_relay.modules.prompt.layout import describe_schema
from vllm_relay.modules.prompt.schema_store import SchemaStore
from vllm_relay.serving.access import mount
from vllm_relay.serving.modular_bodies import ModularBodies
from vllm_relay.serving.modular_requests import keep_store, store_of
from vllm_relay.serving.requests import body_of, relay_router

if TYPE_CHECKING:
    from argparse import Namespace

    from starlette.datastructures import State

logger = logging.getLogger("vllm.relay")


class SchemaEndpoints:
    """Implements vLLM's EndpointPlugin."""

    name = "relay-schemas"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._options = RelayConfig()

    def attach_router(self, app: FastAPI) -> None:
        mount(app, _router())
        app.add_middleware(ModularBodies, max_bytes=lambda: self._options.max_markup_bytes)

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        """Read the configured schemas; the server is not listening yet.

        Raises:
            ValueError: one cannot be understood.
        """
        if engine_client is None:
            return
        config, renderer = engine_client.vllm_config, state.online_renderer
        options = self._options = RelayConfig.from_vllm_config(config)
        state.relay_num_processes = config.parallel_config._api_process_count
        state.relay_max_markup_bytes = options.max_markup_bytes
        state.relay_num_posts = 0
        if reason := unsupported_reason(config):
            keep_store(renderer, reason)
            return
        store = SchemaStore(
            engine_client.renderer.get_tokenizer(),
            block_size=config.cache_config.block_size,
            max_model_len=config.model_config.max_model_len,
            max_schemas=options.max_schemas,
            max_tokens=options.max_schema_tokens,
            chat_template=renderer.chat_template,
            chat_template_kwargs=renderer.default_chat_template_kwargs,
        )
        for path in options.schemas:
            store.add(Path(path), CONFIGURATION)
        if names := store.names():
            logger.info("vllm-relay: schemas of prompt modules: %s", ", ".join(names))
        keep_store(renderer, store)


MAX_POSTS = 8
"""How many schemas are added at once."""
_STATUS: dict[type[ValueError], int] = {SchemaTooLongError: 422, TooManySchemasError: 409}


def _store(raw_request: Request) -> SchemaStore:
    try:
        return store_of(raw_request.app.state.online_renderer)
    except ValueError as error:
        raise CommandError(501, str(error)) from None


def _own_store(raw_request: Request) -> SchemaStore:
    store = _store(raw_request)
    num_processes = raw_request.app.state.relay_num_processes
    if num_processes > 1:
        raise CommandError(
            501,
            f"the other {num_processes - 1} processes of this server would not know of it: list "
            "schemas in additional_config.relay.schemas, or set --api-server-count 1",
        )
    return store


Store = Annotated[SchemaStore, Depends(_store)]
OwnStore = Annotated[SchemaStore, Depends(_own_store)]


def _router() -> APIRouter:
    router = relay_router()

    @router.post("/schemas", status_code=201)
    async def add(raw_request: Request, store: OwnStore) -> Response:
        """Add a schema, or take the place of the one with its name and owner; the body is PML."""
        state = raw_request.app.state
        if state.relay_num_posts == MAX_POSTS:
            raise CommandError(
                429, f"{MAX_POSTS} schemas are being added, which is the most: send it again later"
            )
        state.relay_num_posts += 1
        try:
            body = await body_of(raw_request, state.relay_max_markup_bytes)
            # long ones must not keep others waiting
            parsed = await asyncio.to_thread(parse_schema, body.decode())
            added = await asyncio.to_thread(store.add, parsed, raw_request.state.relay_owner)
            described = await asyncio.to_thread(describe_schema, added, store.block_size)
        except ValueError as error:
            raise CommandError(_STATUS.get(type(error), 400), str(error)) from None
        finally:
            state.relay_num_posts -= 1
        return JSONResponse(described, 201)

    @router.get("/schemas")
    async def schemas(store: Store) -> Response:
        """The names of all schemas."""
        return JSONResponse({"schemas": store.names()})

    @router.get("/schemas/{name}")
    async def schema(name: str, store: Store) -> Response:
        """The layout of a schema."""
        if name not in store:
            raise CommandError(404, store.unknown(name))
        return JSONResponse(describe_schema(store[name], store.block_size))

    @router.delete("/schemas/{name}", status_code=204)
    async def remove(raw_request: Request, name: str, store: OwnStore) -> Response:
        """Forget a schema; what is computed of it is evicted when there is need."""
        if name not in store:
            raise CommandError(404, store.unknown(name))
        store.remove(name, raw_request.state.relay_owner)
        return Response(status_code=204)

    return router
