# SPDX-License-Identifier: Apache-2.0
"""The live page of all replicas: their events in one stream, and changes sent where they belong.

Sources and pins have the id of their replica before their own. Replicas know who may look at them
and change them: the API key is sent on.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import asynccontextmanager
from contextvars import Context
from dataclasses import replace
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from starlette.responses import Response, StreamingResponse

from vllm_relay.cluster.ray.asked import ENDED, Visit, refusal
from vllm_relay.cluster.ray.tunnel import HttpAnswer, HttpRequest

logger = logging.getLogger("vllm.relay")

LOOK_EVERY_S = 2.0
"""For replicas that are new, while somebody looks at the page."""
ANSWER_TIMEOUT_S = 10.0
"""Of a replica that is asked who is there, for its pins, or for its first event."""
MAX_STREAM_S = 900.0
"""Ray Serve holds what a viewer does not read. The page asks again when its stream has ended."""
_KEEP_ALIVE_S = 10.0
_LOOK_AGAIN_S = 0.1

_BY_NODE = (
    "expected an object with source and node, as the live page has them: for another pin ask "
    "for system_prompts at the start"
)


class _RefusedError(Exception):
    """Of all replicas, as one of them says it, or why none says anything."""

    def __init__(self, answer: Response) -> None:
        self.answer = answer


class _GoneError(Exception):
    """What has become of a replica that does not answer, or not to the end."""

    def __init__(self, what: str = "has ended or failed", status: int = 503) -> None:
        super().__init__(what)
        self.status = status


class ReplicaPages:
    """
    Args:
        replicas: a handle of theirs, whose answers stream.
    """

    def __init__(self, replicas: Any) -> None:
        self._replicas = replicas

    async def answer(self, request: HttpRequest) -> Response:
        """To a request whose path is one of `ROUTES`."""
        answers = {
            method: answer
            for (method, path), answer in _ANSWERS.items()
            if re.fullmatch(path, request.path)
        }
        if request.method not in answers:
            allowed = ", ".join(answers)
            wrong = f"{request.path}: given {request.method}, expected {allowed}"
            return refusal(wrong, 405, {"allow": allowed})
        try:
            return await answers[request.method](self, request)
        except TimeoutError:
            return refusal(f"no replica has answered for {ANSWER_TIMEOUT_S:g} s", 503)
        except RayServeException as failure:
            return refusal(_why(failure), 503)

    async def _unpin(self, request: HttpRequest) -> Response:
        folder, _, pin = request.path.rpartition("/")
        replica, _, pin = pin.partition(":")
        return await self._change(replica, replace(request, path=f"{folder}/{pin}"))

    async def _change_node(self, request: HttpRequest) -> Response:
        try:
            body = json.loads(request.body)
            replica, _, body["source"] = body["source"].partition(":")
        except (ValueError, TypeError, KeyError, AttributeError):
            return refusal(_BY_NODE, 400)
        headers = [each for each in request.headers if each[0] != b"content-length"]
        encoded = json.dumps(body).encode()
        answer = await self._change(replica, replace(request, headers=headers, body=encoded))
        if answer.status_code != 201:
            return answer
        return _json(201, _of_replica(replica, json.loads(bytes(answer.body))))

    async def _change(self, replica: str, request: HttpRequest) -> Response:
        try:
            return await self._whole(replica, request)
        except _GoneError as gone:
            return refusal(f"replica {replica} {gone}: look again", gone.status)

    async def _pins(self, request: HttpRequest) -> Response:
        """Those of the replicas that answer in time."""
        gone: dict[str, str] = {}

        async def answer_of(replica: str) -> Response | None:
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    return await self._whole(replica, request)
            except TimeoutError:
                return None
            except _GoneError as error:
                gone[replica] = str(error)
                return None

        there = await self._there()
        answers = dict(zip(there, await asyncio.gather(*map(answer_of, there)), strict=True))
        answered = {replica: answer for replica, answer in answers.items() if answer is not None}
        if not answered:
            return _nobody(there, gone)
        served = {replica: each for replica, each in answered.items() if each.status_code == 200}
        if not served:
            return next(iter(answered.values()))
        pins = [
            _of_replica(replica, pin)
            for replica, answer in served.items()
            for pin in json.loads(bytes(answer.body))["pins"]
        ]
        return _json(200, {"pins": pins})

    async def _whole(self, replica: str, request: HttpRequest) -> Response:
        """The whole answer of a replica.

        Raises:
            _GoneError: there is none.
        """
        async with self._begun(replica, request) as (begin, rest):
            return _response(begin, b"".join([each async for each in rest]))

    @asynccontextmanager
    async def _begun(
        self, replica: str, request: HttpRequest
    ) -> AsyncIterator[tuple[HttpAnswer, Any]]:
        """The beginning of a replica's answer and the rest.

        Raises:
            _GoneError: it has ended or failed, before or in the middle of it.
        """
        try:
            async with self._ask(Visit(replica), request) as answer:
                begin: HttpAnswer | None = await anext(answer, None)
                if begin is None:
                    raise _GoneError
                if any(name == ENDED for name, _ in begin.headers):
                    raise _GoneError("has ended", begin.status)
                yield begin, answer
        except RayServeException as failure:
            raise _GoneError(f"is not reached ({_why(failure)})") from failure
        except RayError as failure:
            raise _GoneError from failure

    async def _there(self) -> list[str]:
        """The ids of all replicas.

        Raises:
            TimeoutError: none answers.
            RayServeException: none can be asked.
        """
        visit = Visit()
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            while True:
                try:
                    async with self._ask(visit, HttpRequest("HEAD", "/relay/", b"", [], b"")) as it:
                        await anext(it, None)
                        return visit.there
                except RayError:  # another one may be there
                    await asyncio.sleep(_LOOK_AGAIN_S)

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
        except _RefusedError as refused:
            return refused.answer

        async def all_events() -> AsyncIterator[str]:
            yield first
            async for each in stream:
                yield each

        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(all_events(), media_type="text/event-stream", headers=headers)

    async def _merged(self, request: HttpRequest, there: list[str]) -> AsyncGenerator[str, None]:
        """The events of all replicas. Each that comes is told with all others in a new `hello`,
        the first of which is the first event.

        Raises:
            _RefusedError: before that, if all that are there now refuse or do not answer.
        """
        told: asyncio.Queue[tuple[str, str, Any]] = asyncio.Queue()

        def tell_why(watching: asyncio.Task[None]) -> None:
            if not watching.cancelled() and (failure := watching.exception()):
                told.put_nowait(("", "failed", failure))

        watching = asyncio.create_task(self._watch(request, there, told))
        watching.add_done_callback(tell_why)
        sources: dict[str, list[dict[str, str]]] = {}  # by replica
        refused: dict[str, Response] = {}
        gone: dict[str, str] = {}
        is_open = False
        clock = asyncio.get_running_loop().time
        begin_s = clock()
        try:
            while clock() < begin_s + MAX_STREAM_S:
                wait_s = _KEEP_ALIVE_S if is_open else begin_s + ANSWER_TIMEOUT_S - clock()
                try:
                    replica, kind, data = await asyncio.wait_for(told.get(), wait_s)
                except TimeoutError:
                    if not is_open:
                        raise _refused_by(there, refused, gone) from None
                    yield ": keep-alive\n\n"
                    continue
                if kind == "failed":
                    if not is_open:
                        raise _RefusedError(refusal(_why(data), 503))
                    yield _event("error", {"message": _why(data), "code": 503})
                    return
                if kind == "refused":
                    refused[replica] = data
                elif kind == "ended":
                    gone[replica] = data
                    for each in sources.pop(replica, ()):
                        yield _event("gone", {"source": each["id"]})
                elif kind == "hello":
                    is_open = True
                    sources[replica] = [
                        {**_of_replica(replica, each), "name": f"replica {replica}"}
                        for each in data["sources"]
                    ]
                    known = [each for name in sorted(sources) for each in sources[name]]
                    yield _event(kind, {**data, "sources": known})
                elif kind != "gone":  # it ends then
                    yield _event(kind, {**data, "source": f"{replica}:{data['source']}"})
                if not is_open and (refused.keys() | gone).issuperset(there):
                    raise _refused_by(there, refused, gone)
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
        what = "has ended"
        try:
            async with self._begun(replica, request) as (begin, rest):
                if begin.status == 200:
                    async for kind, data in _events_of(begin.body, rest):
                        told.put_nowait((replica, kind, data))
                else:
                    told.put_nowait((replica, "refused", _response(begin)))
        except _GoneError as gone:
            what = str(gone)
        told.put_nowait((replica, "ended", what))


_ANSWERS = {
    ("GET", "/relay/forest/events"): ReplicaPages._events,
    ("POST", "/relay/forest/evict"): ReplicaPages._change_node,
    ("GET", "/relay/pins"): ReplicaPages._pins,
    ("POST", "/relay/pins"): ReplicaPages._change_node,
    ("DELETE", "/relay/pins/[^/]+"): ReplicaPages._unpin,
}
"""By method and path."""
ROUTES = re.compile("|".join(path for _, path in _ANSWERS))


async def _events_of(first: bytes, more: AsyncIterator[bytes]) -> AsyncIterator[tuple[str, Any]]:
    fields: dict[bytes, bytes] = {}
    async for line in _lines_of(first, more):
        if line:
            name, _, value = line.partition(b": ")
            fields[name] = value
            continue
        if b"data" in fields:
            yield fields[b"event"].decode(), json.loads(fields[b"data"])
        fields = {}


async def _lines_of(first: bytes, more: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Those that have ended. Each part is searched once, however long a line is."""
    begun: list[bytes] = []
    part: bytes | None = first
    while part is not None:
        *ends, rest = part.split(b"\n")
        for end in ends:
            yield b"".join([*begun, end])
            begun.clear()
        begun.append(rest)
        part = await anext(more, None)


def _refused_by(
    there: list[str], refused: dict[str, Response], gone: dict[str, str]
) -> _RefusedError:
    return _RefusedError(next(iter(refused.values()), None) or _nobody(there, gone))


def _nobody(there: Iterable[str], gone: dict[str, str]) -> Response:
    """
    Args:
        gone: what has become of replicas; others are late.
    """
    late = f"has not answered for {ANSWER_TIMEOUT_S:g} s"
    each = ", ".join(f"{replica} {gone.get(replica, late)}" for replica in there)
    return refusal(f"no replica has answered: {each}", 503)


def _why(failure: BaseException) -> str:
    """In words for whoever asks: what only its maintainers understand is in the log."""
    failure = getattr(failure, "exceptions", [failure])[0]  # of a TaskGroup
    if isinstance(failure, RayServeException):
        return f"{type(failure).__name__}: {getattr(failure, 'message', failure)}"
    logger.error("vllm-relay: the live page of all replicas failed", exc_info=failure)
    return f"{type(failure).__name__}: the endpoint's log says why"


def _response(begin: HttpAnswer, rest: bytes = b"") -> Response:
    response = Response(begin.body + rest, begin.status)
    response.raw_headers = begin.headers
    return response


def _of_replica(replica: str, named: dict[str, Any]) -> dict[str, Any]:
    return {**named, "id": f"{replica}:{named['id']}"}


def _event(kind: str, data: dict[str, Any]) -> str:
    return f"event: {kind}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"


def _json(status: int, content: Any) -> Response:
    return Response(json.dumps(content), status, media_type="application/json")
