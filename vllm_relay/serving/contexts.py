# SPDX-License-Identifier: Apache-2.0
"""The server's routes for stored contexts, as an endpoint plug-in of vLLM."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response

from vllm_relay.commands.owners import refuse_configured
from vllm_relay.config import SECTION, RelayConfig
from vllm_relay.limits import sparse_is_selected
from vllm_relay.long_context.client import (
    configured_contexts,
    delete_context_async,
    keep_context_async,
    list_contexts_async,
    preload_contexts_async,
    serve_clients_async,
)
from vllm_relay.long_context.orders import KEEP_ARG, is_asked_for
from vllm_relay.serving.access import api_keys, mount
from vllm_relay.serving.requests import PromptRequest, relay_router, tokens_of_request

if TYPE_CHECKING:
    from argparse import Namespace

    from starlette.datastructures import State


class ContextEndpoints:
    """Implements vLLM's EndpointPlugin."""

    name = "relay-contexts"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        mount(app, _router())

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        """Compute the configured contexts; the server is not listening yet.

        Raises:
            ValueError: one cannot be kept.
        """
        if engine_client is not None and sparse_is_selected(engine_client.vllm_config):
            await preload_contexts_async(engine_client, state.online_renderer)
            state.relay_configured_contexts = configured_contexts(engine_client)
            reason = _reason_to_keep_none(engine_client, args)
            setattr(state.online_renderer, _REASON_ATTRIBUTE, reason)
            await serve_clients_async(engine_client, keeps=reason is None)


_REASON_ATTRIBUTE = "relay_keeps_no_requests"
"""Of a server's renderer: why none of its requests becomes a context; None: they may."""


def _reason_to_keep_none(engine_client: Any, args: Namespace) -> str | None:
    allowed = RelayConfig.from_vllm_config(engine_client.vllm_config).client_contexts
    if allowed == "off":
        return f"{SECTION}.client_contexts=off keeps no requests of clients: leave it out"
    if allowed == "guarded" and not api_keys(args):
        return (
            "this server has no API key, so it keeps no requests of clients: leave it out, or "
            "start the server with --api-key, or, where all who reach it are trusted, with "
            f"{SECTION}.client_contexts=open"
        )
    return None


def check_keeping(renderer: Any, request: Any) -> None:
    """Refuse a completion or chat completion that asks to become a context where none does.

    Raises:
        ValueError: with the reason.
    """
    reason = getattr(renderer, _REASON_ATTRIBUTE, None)
    if reason is not None and is_asked_for(getattr(request, "vllm_xargs", None)):
        raise ValueError(f"{KEEP_ARG}: {reason}")


def _router() -> APIRouter:
    router = relay_router()

    @router.post("/contexts", status_code=201)
    async def keep(raw_request: Request) -> Response:
        """Compute a prompt and keep it."""
        request = PromptRequest.model_validate_json(await raw_request.body())
        state = raw_request.app.state
        token_ids = await tokens_of_request(state, request)
        context = await keep_context_async(state.engine_client, token_ids)
        return JSONResponse(asdict(context), 201)

    @router.get("/contexts")
    async def contexts(raw_request: Request) -> Response:
        """The stored contexts."""
        found = await list_contexts_async(raw_request.app.state.engine_client)
        return JSONResponse({"contexts": [asdict(each) for each in found]})

    @router.delete("/contexts/{context_id}", status_code=204)
    async def delete(context_id: str, raw_request: Request) -> Response:
        """Forget a context, and delete its file."""
        state = raw_request.app.state
        if context_id in getattr(state, "relay_configured_contexts", ()):
            refuse_configured(f"context {context_id!r}", "contexts")
        await delete_context_async(state.engine_client, context_id)
        return Response(status_code=204)

    return router
