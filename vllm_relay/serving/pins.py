# SPDX-License-Identifier: Apache-2.0
"""The server's routes for pinned prompts, as an endpoint plug-in of vLLM."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field, model_validator

from vllm_relay.commands.errors import CommandError
from vllm_relay.config import RelayConfig, scheduler_is_selected
from vllm_relay.prefix_cache.pins.client import (
    Declaration,
    Pin,
    list_pins_async,
    pin_tokens_async,
    unpin_async,
)
from vllm_relay.prefix_cache.pins.system_prompts import pin_system_prompts_async
from vllm_relay.serving.access import mount
from vllm_relay.serving.modular_requests import ModularPrompt, store_of
from vllm_relay.serving.page import prefix_tokens
from vllm_relay.serving.requests import PromptRequest, relay_router, tokens_of_request, too_long

if TYPE_CHECKING:
    from argparse import Namespace

    from starlette.datastructures import State
    from typing_extensions import Self


class PinRequest(PromptRequest):
    """The body of ``POST /relay/pins``."""

    _FORMS: ClassVar[tuple[str, ...]] = ("text", "messages", "prompt_token_ids", "relay", "node")

    source: str | None = None  # of the live page
    node: Annotated[int, Field(strict=True)] | None = None
    id: str | None = None
    ttl_s: Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)] | None = None
    relay: ModularPrompt | None = None

    @model_validator(mode="after")
    def _check_node(self) -> Self:
        if (self.source is None) != (self.node is None):
            raise ValueError("expected source and node together")
        return self


class PinEndpoints:
    """Implements vLLM's EndpointPlugin."""

    name = "relay"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        mount(app, _router())

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        """Pin the configured system prompts; the server is not listening yet.

        Raises:
            ValueError: one cannot be pinned.
        """
        if engine_client is not None and scheduler_is_selected(engine_client.vllm_config):
            await pin_system_prompts_async(engine_client, state.online_renderer)


def _router() -> APIRouter:
    router = relay_router()

    @router.post("/pins", status_code=201)
    async def pin(raw_request: Request) -> Response:
        """Compute a prompt and keep its KV blocks."""
        body = await raw_request.body()
        request = PinRequest.model_validate_json(body)
        engine = raw_request.app.state.engine_client
        max_bytes = RelayConfig.from_vllm_config(engine.vllm_config).max_markup_bytes
        if request.relay is not None and len(body) > max_bytes:
            raise CommandError(413, too_long(max_bytes))
        owner = raw_request.state.relay_owner
        return JSONResponse(asdict(await _pin(raw_request.app.state, request, owner)), 201)

    @router.get("/pins")
    async def pins(raw_request: Request) -> Response:
        """The pinned prompts."""
        pins = await list_pins_async(raw_request.app.state.engine_client)
        return JSONResponse({"pins": list(map(asdict, pins))})

    @router.delete("/pins/{pin_id}", status_code=204)
    async def unpin(pin_id: str, raw_request: Request) -> Response:
        """Let the KV blocks of a prompt be evicted again."""
        engine, owner = raw_request.app.state.engine_client, raw_request.state.relay_owner
        await unpin_async(engine, pin_id, owner)
        return Response(status_code=204)

    return router


async def _pin(state: State, request: PinRequest, owner: str) -> Pin:
    plan = None
    if request.relay is not None:
        try:
            store = store_of(state.online_renderer)
        except ValueError as error:
            raise CommandError(501, str(error)) from None
        try:
            rendered = await asyncio.to_thread(request.relay.render, store, to_pin=True)
        except ValueError as error:
            raise CommandError(400, str(error)) from None
        token_ids, plan = rendered.token_ids, rendered.plan
    elif request.source is not None and request.node is not None:
        token_ids = await prefix_tokens(state, request.source, request.node)
    else:
        token_ids = await tokens_of_request(state, request)
    asked = Declaration(token_ids, request.id, plan, owner, request.ttl_s)
    return await pin_tokens_async(state.engine_client, asked)
