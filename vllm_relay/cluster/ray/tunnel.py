# SPDX-License-Identifier: Apache-2.0
"""An HTTP request to an ASGI application in another process, as messages that actors can pass."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class HttpRequest:
    """The parts of an ASGI scope of these names, and the whole body."""

    method: str
    path: str
    query_string: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes


@dataclass(frozen=True)
class HttpAnswer:
    """The beginning of an answer, whose `body` is not all if `has_more`."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    has_more: bool


_running: set[asyncio.Future[None]] = set()


async def answer_of(app: Any, request: HttpRequest) -> AsyncGenerator[HttpAnswer | bytes, None]:
    """What an application answers: the beginning with the first bytes of the body, then more bytes.
    Whoever stops reading cancels the request.

    Raises:
        Exception: what the application raises before it answers.
    """
    sent: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
    task = asyncio.ensure_future(_run(app, request, sent))
    _running.add(task)
    task.add_done_callback(_running.discard)
    is_complete = False
    try:
        start: dict[str, Any] | None = None
        is_begun = False
        while (message := await sent.get()) is not None:
            if message["type"] == "http.response.start":
                start = message
                continue
            body, has_more = message.get("body", b""), message.get("more_body", False)
            # what has come meanwhile goes along
            while has_more and not sent.empty():
                more = sent.get_nowait()
                if more is None:  # for the loop outside
                    sent.put_nowait(None)
                    break
                body += more.get("body", b"")
                has_more = more.get("more_body", False)
            if not body and has_more:
                continue
            is_complete = not has_more
            if is_begun:
                yield body
            else:
                assert start is not None
                headers = [(bytes(name), bytes(value)) for name, value in start["headers"]]
                yield HttpAnswer(start["status"], headers, body, has_more)
                is_begun = True
            if is_complete:
                return
        await task
        raise RuntimeError("the application ended without a complete answer")
    finally:
        if not is_complete:  # else it may have work to do after its answer
            task.cancel()


async def _run(app: Any, request: HttpRequest, sent: asyncio.Queue[dict[str, Any] | None]) -> None:
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.path,
        "raw_path": request.path.encode(),
        "query_string": request.query_string,
        "root_path": "",
        "headers": request.headers,
        "client": None,
        "server": None,
        "state": {},
    }
    incoming = [{"type": "http.request", "body": request.body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if not incoming:
            await asyncio.Event().wait()  # a client that is gone cancels all of this
        return incoming.pop()

    async def send(message: dict[str, Any]) -> None:
        sent.put_nowait(message)

    try:
        await app(scope, receive, send)
    finally:
        sent.put_nowait(None)
