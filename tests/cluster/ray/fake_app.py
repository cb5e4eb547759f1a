# SPDX-License-Identifier: Apache-2.0
"""An application in place of vLLM's, which a test can watch from outside, hold and make fail."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.cluster.ray.fake_page import FakePage
from vllm_relay.cluster.ray.asked import CACHE_TOKENS, application_for
from vllm_relay.cluster.ray.tunnel import answer_of


async def complete(request: Request) -> Response:
    """Says which process answers. Of the body: `began`, `until` and `cancelled` are files that are
    made, waited for and made; `dies` is made by the process that dies of it, the first one."""
    try:
        asked = json.loads(await request.body())
    except ValueError:
        return JSONResponse({"error": {"message": "no JSON", "code": 400}}, 400)
    if asked.get("model") != "fake":
        return JSONResponse({"error": {"message": "no such model", "code": 404}}, 404)
    if asked.get("stream"):
        return StreamingResponse(events(asked), media_type="text/event-stream")
    await hold(asked)
    headers = {"x-query": request.url.query, "x-given": request.headers.get("x-given", "")}
    return JSONResponse({"process": os.getpid()}, headers=headers)


async def events(asked: dict[str, Any]) -> AsyncIterator[str]:
    yield f'data: {{"process": {os.getpid()}}}\n\n'
    await hold(asked)
    yield "data: [DONE]\n\n"


async def hold(asked: dict[str, Any]) -> None:
    if "began" in asked:
        Path(asked["began"]).touch()
    try:
        while "until" in asked and not Path(asked["until"]).exists():
            await asyncio.sleep(0.01)
    except asyncio.CancelledError:
        Path(asked["cancelled"]).touch()
        raise
    if "dies" in asked:
        try:
            Path(asked["dies"]).touch(exist_ok=False)
        except FileExistsError:
            return
        os._exit(1)


class FakeReplica:
    """In place of `VllmReplica`."""

    def __init__(self) -> None:
        self._app = Starlette(
            routes=[Route("/v1/completions", complete, methods=["POST"]), *FakePage().routes()],
        )

    async def ask(self, request: Any, to: str | None) -> AsyncIterator[Any]:
        async with aclosing(answer_of(application_for(to, self._app), request)) as answer:
            async for each in answer:
                yield each

    def record_replica_metadata(self) -> dict[str, Any]:
        return {CACHE_TOKENS: 100_000}
