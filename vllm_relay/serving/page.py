# SPDX-License-Identifier: Apache-2.0
"""The live page of a server and what it reads, as an endpoint plug-in of vLLM."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.staticfiles import StaticFiles

from vllm_relay.commands.engine import call_ranks_async
from vllm_relay.commands.errors import CommandError
from vllm_relay.config import SECTION, RelayConfig
from vllm_relay.limits import relay_is_selected
from vllm_relay.page.source import Source
from vllm_relay.page.viewers import Viewers
from vllm_relay.serving.access import api_keys, mount, routes_of
from vllm_relay.serving.requests import error_response, relay_router

if TYPE_CHECKING:
    from argparse import Namespace

    from starlette.datastructures import State

STATIC = Path(str(resources.files("vllm_relay.page") / "static"))
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Nothing is asked of other servers; an upgraded server is not shown with an old page."""


class Evict(BaseModel):
    """The body of ``POST /relay/forest/evict``."""

    model_config = ConfigDict(extra="forbid")

    source: Annotated[str, Field(max_length=64)]
    node: Annotated[int, Field(strict=True)]


class PageEndpoints:
    """Implements vLLM's EndpointPlugin."""

    name = "relay-page"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        mount(app, _router())
        if routes_of(app) != "off":
            mount(app, _page_router())
            app.mount("/relay/static", _Static(directory=STATIC))

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        if engine_client is not None and _has_page(engine_client):
            state.relay_viewers = _viewers(engine_client)


class _Static(StaticFiles):
    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(_HEADERS)
        return response


def _page_router() -> APIRouter:
    """The page holds no data, and asks for the key."""
    router = APIRouter(prefix="/relay", tags=["relay"])

    @router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page(raw_request: Request) -> Response:
        try:
            viewers_of(raw_request.app.state)
        except CommandError as error:
            return error_response(error.status, str(error))
        return FileResponse(STATIC / "index.html", headers=_HEADERS)

    return router


def _router() -> APIRouter:
    router = relay_router()

    @router.get("/forest/events")
    async def events(raw_request: Request, texts: bool = False) -> Response:
        """The prefix forest as it is now, and how it changes, as server-sent events."""
        viewers = viewers_of(raw_request.app.state)
        stream = await viewers.join(texts and _shows_texts(raw_request.app))
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)

    @router.post("/forest/evict")
    async def evict(raw_request: Request) -> Response:
        """Let a prefix, and all that continues it, be found in the KV cache no more."""
        asked = Evict.model_validate_json(await raw_request.body())
        async with viewers_of(raw_request.app.state).source(asked.source) as source:
            engine, blocks = raw_request.app.state.engine_client, source.blocks_behind(asked.node)
            evicted = await _ask_feed(engine, "evict_prefix", source, blocks)
        return JSONResponse({"evicted_blocks": evicted})

    return router


def viewers_of(state: State) -> Viewers:
    """
    Raises:
        CommandError: 404 the server has no live page.
    """
    viewers = getattr(state, "relay_viewers", None)
    if viewers is None:
        raise CommandError(404, f"this server has no live page: start it with {SECTION}.page=true")
    return viewers


async def prefix_tokens(state: State, source_id: str, node_id: int) -> list[int]:
    """The tokens of a node of the forest, from the beginning of its prompts on.

    Raises:
        CommandError: 404 there is no such source or node, 409 these are not the tokens of a whole
            prefix.
    """
    async with viewers_of(state).source(source_id) as source:
        blocks = source.blocks_before(node_id)
        return await _ask_feed(state.engine_client, "prefix_tokens", source, blocks)


async def _ask_feed(
    engine: Any, command: str, source: Source, blocks: list[tuple[int, int]]
) -> Any:
    """What the engine of a source answers.

    Raises:
        CommandError: its own, or 409 it has begun anew.
    """
    arguments = {"feed": source.feed, "blocks": blocks}
    for answer in (await call_ranks_async(engine, command, arguments)).values():
        if isinstance(answer, CommandError):
            raise answer
        if answer is not None:
            return answer
    raise CommandError(409, f"the engine of source {source.id!r} has begun anew: look again")


def _shows_texts(app: FastAPI) -> bool:
    """Not where whoever reaches the server would read what all others have sent."""
    return bool(api_keys(getattr(app.state, "args", None))) or routes_of(app) == "open"


def _has_page(engine: Any) -> bool:
    return RelayConfig.from_vllm_config(engine.vllm_config).page


def _viewers(engine: Any) -> Viewers:
    config = engine.vllm_config
    options = RelayConfig.from_vllm_config(config)
    shares = relay_is_selected(config) and options.sharing
    decode = _decoder(engine)

    async def ask(name: str, arguments: dict[str, Any]) -> dict[int, Any]:
        return await call_ranks_async(engine, name, arguments)

    def source(rank: int) -> Source:
        return Source(str(rank), f"rank {rank}", decode, shares)

    served = config.model_config.served_model_name or config.model_config.model
    model = served[0] if isinstance(served, list) else served
    return Viewers(ask, source, {"version": 2, "model": model})


def _decoder(engine: Any) -> Callable[[list[int]], str] | None:
    tokenizer = getattr(engine.renderer, "tokenizer", None)
    return None if tokenizer is None else tokenizer.decode
