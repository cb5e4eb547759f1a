# SPDX-License-Identifier: Apache-2.0
"""A server of the page with a feed that tests write, in a thread."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

import vllm_relay

STATIC = Path(vllm_relay.__file__).parent / "page" / "static"

Event = tuple[str, dict[str, Any]]


class FeedServer:
    """Serves the routes under ``/relay/`` that the page asks.

    What a viewer is sent when it comes is what `first` gives; `send` adds to that.
    """

    def __init__(self, first: Callable[[bool], list[Event]]) -> None:
        self.first = first
        self.key: str | None = None  # the API key it wants
        self.refusal: tuple[int, str] | None = None  # instead of a feed
        self.evict_refusal: str | None = None
        self.requests: list[tuple[str, str, Any]] = []  # method, path with query, body
        self.pins: list[dict[str, Any]] = []
        self.files: dict[str, str] = {}  # below static/, beside those that are there
        self.address = ""
        self._queues: list[asyncio.Queue[bytes | None]] = []
        self._loop = asyncio.new_event_loop()

    @property
    def viewers(self) -> int:
        return len(self._queues)

    def send(self, event: str, data: dict[str, Any]) -> None:
        """To all viewers."""
        self._put(encoded(event, data))

    def drop(self) -> None:
        """Closes the feed of all viewers."""
        self._put(None)

    def _put(self, data: bytes | None) -> None:
        for queue in list(self._queues):
            self._loop.call_soon_threadsafe(queue.put_nowait, data)

    @contextmanager
    def running(self) -> Iterator[FeedServer]:
        ready = threading.Event()
        thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        thread.start()
        ready.wait()
        try:
            yield self
        finally:
            self._put(None)
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join()

    def _run(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application(middlewares=[self._recorded])
        app.router.add_get("/relay/", self._index)
        app.router.add_get("/relay/static/{name:.+}", self._file)
        app.router.add_get("/relay/forest/events", self._events)
        app.router.add_post("/relay/forest/evict", self._evict)
        app.router.add_get("/relay/pins", self._pins)
        app.router.add_post("/relay/pins", self._pin)
        app.router.add_delete("/relay/pins/{id}", self._unpin)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        port = runner.addresses[0][1]
        self.address = f"http://127.0.0.1:{port}/relay/"
        ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    @web.middleware
    async def _recorded(self, request: web.Request, handler: Any) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        self.requests.append((request.method, request.path_qs.removeprefix("/relay/"), body))
        open_to_all = request.path == "/relay/" or request.path.startswith("/relay/static/")
        given = request.headers.get("Authorization")
        if self.key is not None and not open_to_all and given != f"Bearer {self.key}":
            return error(401, "expected the header 'Authorization: Bearer API_KEY'")
        return await handler(request)

    async def _index(self, request: web.Request) -> web.StreamResponse:
        return web.FileResponse(STATIC / "index.html")

    async def _file(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name in self.files:
            return web.Response(text=self.files[name])
        return web.FileResponse(STATIC / name)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if self.refusal is not None:
            return error(*self.refusal)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._queues.append(queue)
        try:
            for event, data in self.first(request.query.get("texts") == "1"):
                await response.write(encoded(event, data))
            while (data := await queue.get()) is not None:
                await response.write(data)
        except ConnectionError:
            pass
        finally:
            self._queues.remove(queue)
        return response

    async def _evict(self, request: web.Request) -> web.StreamResponse:
        if self.evict_refusal is not None:
            return error(409, self.evict_refusal)
        return web.json_response({"evicted_blocks": 3})

    async def _pins(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"pins": self.pins})

    async def _pin(self, request: web.Request) -> web.StreamResponse:
        pin = pin_of(f"pin-{len(self.pins)}")
        self.pins.append(pin)
        return web.json_response(pin, status=201)

    async def _unpin(self, request: web.Request) -> web.StreamResponse:
        self.pins = [pin for pin in self.pins if pin["id"] != request.match_info["id"]]
        return web.Response(status=204)


def pin_of(name: str) -> dict[str, Any]:
    return {
        "id": name,
        "owner": "api-key-0",
        "tokens": 64,
        "blocks": 4,
        "bytes": 4096,
        "resident": True,
        "problem": None,
        "expires_in_s": None,
        "ranks": [],
    }


def encoded(event: str, data: dict[str, Any]) -> bytes:
    return f"event: {event}\ndata: {json.dumps(data)}\n\n".encode()


def error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)
