# SPDX-License-Identifier: Apache-2.0
"""A server of OpenAI's API whose behaviour a test prescribes, in a thread."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from tests.support.waiting import WAIT_S

VLLM_MODEL = {"id": "tiny", "owned_by": "vllm", "root": "org/tiny", "max_model_len": 512}
OTHER_MODEL = {"id": "gpt", "owned_by": "organization"}


@dataclass(frozen=True)
class Reply:
    """
    Attributes:
        page: becomes JSON if it is not bytes.
        delay_s: until the reply is sent.
        held_until: the reply is sent when this is set.
        hangs: no reply is sent; the connection stays open until the client closes it.
        drops: the connection is closed, without a reply.
        crashes: all connections are.
    """

    page: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    held_until: asyncio.Event | None = None
    hangs: bool = False
    drops: bool = False
    crashes: bool = False


Behaviour = Callable[[dict[str, Any]], Reply]


def answer(text: str = "yes", **changes: Any) -> Reply:
    """A good reply to a request for tokens."""
    choice = {"index": 0, "text": text, "finish_reason": "stop", **changes}
    return Reply({"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})


def chat_answer(content: str | None = "yes", **changes: Any) -> Reply:
    """A good reply to a request with messages; `changes` are of the message."""
    message = {"role": "assistant", "content": content, **changes}
    return Reply({"choices": [{"message": message, "finish_reason": "stop"}]})


def failure(status: int, message: str = "it failed", **headers: str) -> Reply:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Reply({"error": {"message": message}}, status, named)


class FakeServer:
    """
    Attributes:
        behaviour: the reply to the body of a POST; called in the server's thread.
        models: the page of /v1/models, or a reply, or a function that gives one of them.
        metrics: the page of /metrics; None has none.
        token_ids: of /tokenize; None has no such path.
        bodies: of the POSTs for prompts, in the order in which they arrived.
        ranks: the data-parallel rank that each of these was meant for, "" if none was said.
        headers: of the latest request, names in lower case.
        num_model_checks: requests of /v1/models.
        num_running: prompts that it has now.
        most_running: prompts that it had at once.
        num_abandoned: prompts whose client was gone before the reply.
    """

    def __init__(self, behaviour: Behaviour, model: dict[str, Any]) -> None:
        self.behaviour = behaviour
        self.models: Any = {"object": "list", "data": [model]}
        self.metrics: str | None = None
        self.token_ids: list[int] | None = None
        self.bodies: list[dict[str, Any]] = []
        self.ranks: list[str] = []
        self.headers: dict[str, str] = {}
        self.num_model_checks = 0
        self.most_running = 0
        self.num_abandoned = 0
        self.port = 0
        self.num_running = 0
        self._changed = threading.Condition()
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop: asyncio.AbstractEventLoop
        self._server: asyncio.Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def prompts(self) -> list[Any]:
        """What was asked, in the order in which it arrived."""
        return [body.get("prompt") or body["messages"][0]["content"] for body in self.bodies]

    def start(self) -> None:
        """Listen, at the same port as before."""
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(
            asyncio.start_server(self._serve, "127.0.0.1", self.port, backlog=1024)
        )
        self.port = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def stop(self) -> None:
        """Close all connections, and listen no more; called from any thread but the server's."""
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._thread = None
            self._loop.run_until_complete(self._end())
            self._loop.close()

    def wait_until_left(self) -> None:
        """Until no client has a connection."""
        with self._changed:
            assert self._changed.wait_for(lambda: not self._writers, timeout=WAIT_S)

    def wait_until_running(self, num_prompts: int) -> None:
        """Until it has so many prompts at once."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.num_running == num_prompts, timeout=WAIT_S)

    async def _end(self) -> None:
        assert self._server is not None
        self._server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with self._changed:
            self._writers.add(writer)
        try:
            gone = (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError)
            with suppress(*gone):
                while await self._serve_one(reader, writer):
                    pass
        finally:
            writer.close()
            with self._changed:
                self._writers.remove(writer)
                self._changed.notify_all()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection stays open."""
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[:-2]
        method, path, _ = first.split()
        self.headers = {
            name.lower(): value for name, value in (line.split(": ", 1) for line in lines)
        }
        body = await reader.readexactly(int(self.headers.get("content-length", 0)))
        if method == "POST" and path.endswith(("completions", "embeddings")):
            self.bodies.append(json.loads(body))
            self.ranks.append(self.headers.get("x-data-parallel-rank", ""))
            with self._changed:
                self.num_running += 1
                self.most_running = max(self.most_running, self.num_running)
                self._changed.notify_all()
            try:
                reply = self.behaviour(self.bodies[-1])
                if not await self._client_stays(reader, reply):
                    self.num_abandoned += 1
                    return False
            finally:
                self.num_running -= 1
        else:
            reply = self._page(path)
        if reply.crashes:
            for each in self._writers:
                each.transport.abort()
        if reply.drops or reply.crashes:
            return False
        page = reply.page if isinstance(reply.page, bytes) else json.dumps(reply.page).encode()
        headers = {"Content-Length": str(len(page)), **reply.headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        writer.write(f"HTTP/1.1 {reply.status} -\r\n{head}\r\n".encode() + page)
        await writer.drain()
        return True

    async def _client_stays(self, reader: asyncio.StreamReader, reply: Reply) -> bool:
        if reply.held_until is not None:
            await reply.held_until.wait()
        if not reply.hangs and not reply.delay_s:
            return True
        # nothing more is sent by a client that waits
        gone = asyncio.ensure_future(reader.read(1))
        try:
            done, _ = await asyncio.wait([gone], timeout=None if reply.hangs else reply.delay_s)
            return not done
        finally:
            gone.cancel()
            with suppress(asyncio.CancelledError):
                await gone

    def _page(self, path: str) -> Reply:
        if path == "/v1/models":
            self.num_model_checks += 1
            models = self.models() if callable(self.models) else self.models
            return models if isinstance(models, Reply) else Reply(models)
        if path == "/metrics" and self.metrics is not None:
            return Reply(self.metrics.encode())
        if path == "/tokenize" and self.token_ids is not None:
            return Reply({"tokens": self.token_ids})
        return failure(404, "Not Found")


@contextmanager
def fake_server(
    behaviour: Behaviour = lambda body: answer(), model: dict[str, Any] = VLLM_MODEL
) -> Iterator[FakeServer]:
    server = FakeServer(behaviour, model)
    server.start()
    try:
        yield server
    finally:
        server.stop()
