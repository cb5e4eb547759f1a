# SPDX-License-Identifier: Apache-2.0
"""A server that answers every prompt in the end, after failing at it in every way it knows."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from random import Random
from typing import Any

FAULTS = (
    *("drop", "reset", "half", "half_chunk", "half_close", "no_json", "html", "no_choices"),
    *("null_choices", "unfinished", "aborted", "full", "busy", "500", "502", "504", "408"),
)
MANNERS = ("plain", "plain", "plain", "trickle", "chunks", "text", "close", "twice")
_MAX_FAULTS = 3
_FAULT_PROBABILITY = 0.3


def answer_to(message: str) -> str:
    """The right answer, of no other prompt."""
    return message.rpartition(": ")[2]


class HostileServer:
    """In a thread of its own. What it does to a prompt follows from the seed and the prompt.

    Attributes:
        num_answered: of each prompt, answers that it has sent whole.
        num_requests: so far.
        refuses_after: requests from which on all are refused; None refuses none.
    """

    def __init__(self, seed: int) -> None:
        self.num_answered: Counter[str] = Counter()
        self.num_requests = 0
        self.refuses_after: int | None = None
        self._seed = seed
        self._num_seen: Counter[str] = Counter()
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(
            asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=1024)
        )
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._end())
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        tasks = [each for each in asyncio.all_tasks() if each is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while await self._serve_one(reader, writer):
                pass
        writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[:-2]
        headers = dict(line.lower().split(": ", 1) for line in lines)
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if first.startswith("GET /v1/models"):
            writer.write(_page(json.dumps({"data": [{"id": "hostile"}]}).encode()))
            return True
        self.num_requests += 1
        if self.refuses_after is not None and self.num_requests > self.refuses_after:
            writer.write(_page(b'{"error": {"message": "the licence has ended"}}', status=400))
            return True
        message = json.loads(body)["messages"][-1]["content"]
        kind = self._kind(message)
        if kind in MANNERS:
            return await self._answer(writer, message, kind)
        return self._fail(writer, message, kind)

    def _kind(self, message: str) -> str:
        """Of the reply to a prompt that has come so many times."""
        num_seen = self._num_seen[message]
        self._num_seen[message] += 1
        random = Random(f"{self._seed} {message} {num_seen}")
        if num_seen < _MAX_FAULTS and random.random() < _FAULT_PROBABILITY:
            return random.choice(FAULTS)
        return random.choice(MANNERS)

    async def _answer(self, writer: asyncio.StreamWriter, message: str, manner: str) -> bool:
        page = _reply(answer_to(message))
        whole = _page(page, content_type="text/plain" if manner == "text" else "")
        pieces = [whole]
        if manner == "trickle":
            pieces = [whole[begin : begin + 40] for begin in range(0, len(whole), 40)]
        elif manner == "chunks":
            chunks = (b"%x\r\n%s\r\n" % (len(each), each) for each in (page[:30], page[30:]))
            pieces = [
                b"HTTP/1.1 200 -\r\nTransfer-Encoding: chunked\r\n\r\n%s%s0\r\n\r\n" % (*chunks,)
            ]
        elif manner == "close":
            pieces = [b"HTTP/1.1 200 -\r\nConnection: close\r\n\r\n" + page]
        elif manner == "twice":
            # the second one is not the reply to whatever is asked next
            pieces = [whole + _page(_reply("-1"))]
        for piece in pieces[:-1]:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.001)
        # before it is sent: who has the whole answer may be gone before this goes on
        self.num_answered[message] += 1
        writer.write(pieces[-1])
        await writer.drain()
        return manner != "close"

    def _fail(self, writer: asyncio.StreamWriter, message: str, fault: str) -> bool:
        right = _reply(answer_to(message))
        if fault == "reset":
            writer.transport.abort()
            return False
        if fault in ("drop", "half", "half_chunk", "half_close"):
            half = right[: len(right) // 2]
            if fault == "half":
                writer.write(_page(right)[: -len(half)])
            elif fault == "half_chunk":
                writer.write(b"HTTP/1.1 200 -\r\nTransfer-Encoding: chunked\r\n\r\n")
                writer.write(b"%x\r\n%s\r\n" % (len(half), half))
            elif fault == "half_close":
                writer.write(b"HTTP/1.1 200 -\r\nConnection: close\r\n\r\n" + half)
            return False
        wrong = answer_to(message)[:1]
        pages: dict[str, bytes] = {
            "no_json": b'{"choices": [{"message": {"content": "1',
            "html": b"<html>busy</html>",
            "no_choices": b'{"choices": []}',
            "null_choices": b'{"choices": null}',
            "unfinished": _reply(wrong, None),
            "aborted": _reply(wrong, "abort"),
        }
        statuses = {"full": 429, "busy": 503}
        if fault in pages:
            writer.write(_page(pages[fault], content_type="text/html" if fault == "html" else ""))
        elif fault in statuses:
            writer.write(_page(b"{}", statuses[fault], retry_after="1"))
        else:
            writer.write(_page(b"it failed", int(fault)))
        return True


def _reply(text: str, finish_reason: str | None = "stop") -> bytes:
    choice: dict[str, Any] = {"message": {"content": text}, "finish_reason": finish_reason}
    return json.dumps({"choices": [choice]}).encode()


def _page(
    page: bytes, status: int = 200, *, content_type: str = "", retry_after: str = ""
) -> bytes:
    headers = {
        "Content-Length": str(len(page)),
        "Content-Type": content_type or "application/json",
        "Retry-After": retry_after,
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items() if value)
    return f"HTTP/1.1 {status} -\r\n{lines}\r\n".encode() + page


@contextmanager
def hostile_server(seed: int) -> Iterator[HostileServer]:
    server = HostileServer(seed)
    try:
        yield server
    finally:
        server.stop()
