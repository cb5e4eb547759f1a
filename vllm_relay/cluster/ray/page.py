# SPDX-License-Identifier: Apache-2.0
"""The live page of all replicas: their events in one stream, and changes sent where they belong.

Sources and pins have the id of their replica before their own. Replicas know who may look at them
and change them: the API key is sent on.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from contextvars import Context
from dataclasses import replace
from typing import Any

from ray.exceptions import RayError
from starlette.responses import Response, StreamingResponse

from vllm_relay.cluster.ray.asked import Visit, refusal
from vllm_relay.cluster.ray.tunnel import HttpAnswer, HttpRequest

ROUTES = re.compile("/relay/(forest/events|forest/evict|pins|pins/[^/]+)")

LOOK_EVERY_S = 2.0
"""For replicas that are new, while somebody looks at the page."""
ANSWER_TIMEOUT_S = 10.0
"""Of a replica that is asked who is there, or for its pins."""
MAX_STREAM_S = 900.0
"""Ray Serve holds what a viewer does not read. The page asks again when its stream has ended."""
_KEEP_ALIVE_S = 10.0

_BY_NODE = (
    "expected an object with source and node, as the live page has them: for another pin ask "
    "for system_prompts at the start"
)


class _RefusedError(Exception):
    """Of all replicas, as one of them says it."""

    def __init__(self, answer: HttpAnswer) -> None:
        self.answer = answer


class ReplicaPages:
    """
    Args:
        replicas: a handle of theirs, whose answers stream.
    """

    def __init__(self, replicas: Any) -> None:
        self._replicas = replicas

    async def answer(self, request: HttpRequest) -> Response:
        """To a request for one of `ROUTES`."""
        try:
            if request.path == "/relay/forest/events":
                return await self._events(request)
            if request.path == "/relay/pins" and request.method == "GET":
                return await self._pins(request)
        except TimeoutError:
            return refusal(f"no replica has answered for {ANSWER_TIMEOUT_S:g} s", 503)
        return await self._change(request)

    async def _change(self, request: HttpRequest) -> Response:
        """Asks the replica of a source or a pin."""
        if request.method == "DELETE":
            folder, _, pin = request.path.rpartition("/")
            replica, _, pin = pin.partition(":")
            return await self._whole(replica, replace(request, path=f"{folder}/{pin}"))
        try:
            body = json.loads(request.body)
            replica, _, body["source"] = body["source"].partition(":")
        except (ValueError, TypeError, KeyError, AttributeError):
            return refusal(_BY_NODE, 400)
        headers = [each for each in request.headers if each[0] != b"content-length"]
        encoded = json.dumps(body).encode()
        answer = await self._whole(replica, replace(request, headers=headers, body=encoded))
        if answer.status_code != 201:
            return answer
        return _json(201, _of_replica(replica, json.loads(bytes(answer.body))))

    async def _pins(self, request: HttpRequest) -> Response:
        there = await self._there()
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            answers = await asyncio.gather(*(self._whole(each, request) for each in there))
        pins = [
            _of_replica(replica, pin)
            for replica, answer in zip(there, answers, strict=True)
            if answer.status_code == 200
            for pin in json.loads(bytes(answer.body))["pins"]
        ]
        if all(answer.status_code != 200 for answer in answers):
            return answers[0]
        return _json(200, {"pins": pins})

    async def _whole(self, replica: str, request: HttpRequest) -> Response:
        """The whole answer of a replica."""
        try:
            async with self._ask(Visit(replica), request) as answer:
                begin: HttpAnswer = await anext(answer)
                body = begin.body + b"".join([each async for each in answer])
        except RayError:
            return refusal(f"replica {replica} has ended or failed: look again", 503)
        response = Response(body, begin.status)
        response.raw_headers = begin.headers
        return response

    async def _there(self) -> list[str]:
        """The ids of all replicas.

        Raises:
            TimeoutError: none answers.
        """
        visit = Visit()
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            while True:
                try:
                    async with self._ask(visit, HttpRequest("HEAD", "/relay/", b"", [], b"")) as it:
                        await anext(it)
                        return visit.there
                except RayError:  # another one may be there
                    pass

    @asynccontextmanager
    async def _ask(self, visit: Visit, request: HttpRequest) -> AsyncIterator[Any]:
        # Ray Serve tells requests apart by their context, which is one for all who ask for a viewer
        answer = Context().run(self._replicas.remote, request, visit)
        try:
            yield answer
        finally:
            answer.cancel()

    async def _events(self, request: HttpRequest) -> Response:
        stream = self._merged(request, await self._there())
        try:
            first = await anext(stream)
        except _RefusedError as error:
            refused = Response(error.answer.body, error.answer.status)
            refused.raw_headers = error.answer.headers
            return refused

        async def all_events() -> AsyncIterator[str]:
            yield first
            async for each in stream:
                yield each

        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(all_events(), media_type="text/event-stream", headers=headers)

    async def _merged(self, request: HttpRequest, there: list[str]) -> AsyncGenerator[str, None]:
        """The events of all replicas. Each that comes is told with all others in a new `hello`.

        Raises:
            _RefusedError: all that are there now refuse.
        """
        told: asyncio.Queue[tuple[str, str, Any]] = asyncio.Queue()
        watching = asyncio.create_task(self._watch(request, there, told))
        sources: dict[str, list[dict[str, str]]] = {}  # by replica
        refusing: set[str] = set()
        clock = asyncio.get_running_loop().time
        until_s = clock() + MAX_STREAM_S
        try:
            while clock() < until_s and not watching.done():
                try:
                    replica, kind, data = await asyncio.wait_for(told.get(), _KEEP_ALIVE_S)
                except TimeoutError:
                    yield ": keep-alive\n\n"
                    continue
                if kind == "refused":
                    refusing.add(replica)
                    if not sources and refusing.issuperset(there):
                        raise _RefusedError(data)
                elif kind == "ended":
                    for each in sources.pop(replica, ()):
                        yield _event("gone", {"source": each["id"]})
                elif kind == "hello":
                    sources[replica] = [
                        {**_of_replica(replica, each), "name": f"replica {replica}"}
                        for each in data["sources"]
                    ]
                    known = [each for name in sorted(sources) for each in sources[name]]
                    yield _event(kind, {**data, "sources": known})
                elif kind != "gone":  # it ends then
                    yield _event(kind, {**data, "source": f"{replica}:{data['source']}"})
        finally:
            watching.cancel()

    async def _watch(
        self, request: HttpRequest, there: list[str], told: asyncio.Queue[tuple[str, str, Any]]
    ) -> None:
        """Read all replicas, also those that come later, or again."""
        reading: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                for replica in there:
                    if replica not in reading or reading[replica].done():
                        reading[replica] = group.create_task(self._read(request, replica, told))
                await asyncio.sleep(LOOK_EVERY_S)
                try:
                    there = await self._there()
                except TimeoutError:
                    there = []

    async def _read(
        self, request: HttpRequest, replica: str, told: asyncio.Queue[tuple[str, str, Any]]
    ) -> None:
        try:
            async with self._ask(Visit(replica), request) as answer:
                begin: HttpAnswer = await anext(answer)
                if begin.status == 200:
                    async for kind, data in _events_of(begin.body, answer):
                        told.put_nowait((replica, kind, data))
                else:
                    told.put_nowait((replica, "refused", begin))
        except RayError:
            pass
        finally:
            told.put_nowait((replica, "ended", None))


async def _events_of(unread: bytes, more: AsyncIterator[bytes]) -> AsyncIterator[tuple[str, Any]]:
    while True:
        *events, unread = unread.split(b"\n\n")
        for event in events:
            fields = dict(line.partition(b": ")[::2] for line in event.split(b"\n"))
            if b"data" in fields:
                yield fields[b"event"].decode(), json.loads(fields[b"data"])
        try:
            unread += await anext(more)
        except StopAsyncIteration:
            return


def _of_replica(replica: str, named: dict[str, Any]) -> dict[str, Any]:
    return {**named, "id": f"{replica}:{named['id']}"}


def _event(kind: str, data: dict[str, Any]) -> str:
    return f"event: {kind}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"


def _json(status: int, content: Any) -> Response:
    return Response(json.dumps(content), status, media_type="application/json")
