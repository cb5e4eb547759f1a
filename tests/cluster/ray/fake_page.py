# SPDX-License-Identifier: Apache-2.0
"""The routes of a server's live page, without an engine."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

KEY = "Bearer secret"
NODE, DEADLY = 17, 666
"""The node that is there until it is evicted, in every replica the same; and one whose eviction
ends the process."""


class FakePage:
    def __init__(self) -> None:
        self._nodes = [{"id": NODE, "parent": None, "tokens": 32}]
        self._pins: list[str] = []
        self._viewers: list[asyncio.Queue[str]] = []

    def routes(self) -> list[Route]:
        return [
            Route("/relay/", lambda request: Response("the page")),
            Route("/relay/forest/events", _guarded(self._events)),
            Route("/relay/forest/evict", _guarded(self._evict), methods=["POST"]),
            Route("/relay/pins", _guarded(self._get_pins)),
            Route("/relay/pins", _guarded(self._pin), methods=["POST"]),
            Route("/relay/pins/{id}", _guarded(self._unpin), methods=["DELETE"]),
        ]

    async def _events(self, request: Request) -> Response:
        texts = request.query_params.get("texts") == "1"

        async def stream() -> AsyncIterator[str]:
            queue: asyncio.Queue[str] = asyncio.Queue()
            self._viewers.append(queue)
            try:
                sources = [{"id": "0", "name": "rank 0"}]
                yield _event("hello", {"model": "fake", "sources": sources, "texts": texts})
                yield _event("snapshot", {"source": "0", "nodes": self._nodes})
                yield ": keep-alive\n\n"
                while True:
                    yield await queue.get()
            finally:
                self._viewers.remove(queue)

        return StreamingResponse(stream(), media_type="text/event-stream")

    async def _evict(self, request: Request) -> Response:
        asked = await request.json()
        if asked["node"] == DEADLY:
            os._exit(1)
        assert asked == {"source": "0", "node": NODE}
        self._nodes = []
        for each in self._viewers:
            each.put_nowait(_event("delta", {"source": "0", "removed": [NODE]}))
        return JSONResponse({"evicted_blocks": 2})

    async def _get_pins(self, request: Request) -> Response:
        pins = [{"id": each, "viewers": len(self._viewers)} for each in ["system", *self._pins]]
        return JSONResponse({"pins": pins})

    async def _pin(self, request: Request) -> Response:
        asked = await request.json()
        assert asked == {"source": "0", "id": asked["id"], "node": NODE}
        self._pins.append(asked["id"])
        return JSONResponse({"id": asked["id"], "blocks": 2}, 201)

    async def _unpin(self, request: Request) -> Response:
        pin = request.path_params["id"]
        if pin not in self._pins:
            return JSONResponse({"error": {"message": f"no pin {pin}", "code": 404}}, 404)
        self._pins.remove(pin)
        return Response(status_code=204)


def _guarded(
    handle: Callable[[Request], Awaitable[Response]],
) -> Callable[[Request], Awaitable[Response]]:
    async def guarded(request: Request) -> Response:
        if request.headers.get("authorization") != KEY:
            return JSONResponse({"error": {"message": "no key", "code": 401}}, 401)
        return await handle(request)

    return guarded


def _event(kind: str, data: Any) -> str:
    return f"id: 1\nevent: {kind}\ndata: {json.dumps(data)}\n\n"
