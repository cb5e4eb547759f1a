# SPDX-License-Identifier: Apache-2.0
"""Answers of an application in messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from vllm_relay.cluster.ray.tunnel import HttpAnswer, HttpRequest, answer_of


def request(path: str, body: bytes = b"") -> HttpRequest:
    return HttpRequest("POST", path, b"a=1", [(b"x-name", b"value")], body)


async def all_of(app: Any, given: HttpRequest) -> list[HttpAnswer | bytes]:
    async with aclosing(answer_of(app, given)) as answer:
        return [each async for each in answer]


async def echo(asked: Request) -> Response:
    text = f"{asked.method} {asked.url.query} {asked.headers['x-name']} "
    return PlainTextResponse(text.encode() + await asked.body(), 201)


async def count(asked: Request) -> Response:
    async def numbers() -> AsyncIterator[str]:
        for number in range(5):
            yield f"{number} "
            await asyncio.sleep(0)

    return StreamingResponse(numbers())


APP = Starlette(
    routes=[Route(f"/{each.__name__}", each, methods=["POST"]) for each in (echo, count)]
)


def test_a_whole_answer_is_one_message() -> None:
    (found,) = asyncio.run(all_of(APP, request("/echo", b"\x00body")))
    assert isinstance(found, HttpAnswer)
    assert (found.status, found.body, found.has_more) == (201, b"POST a=1 value \x00body", False)
    assert dict(found.headers)[b"content-length"] == str(len(found.body)).encode()


def test_a_stream_is_several() -> None:
    begin, *rest = asyncio.run(all_of(APP, request("/count")))
    assert isinstance(begin, HttpAnswer) and begin.has_more and begin.body
    more = [each for each in rest if isinstance(each, bytes)]
    assert len(more) == len(rest) and begin.body + b"".join(more) == b"0 1 2 3 4 "


def test_work_after_the_answer_is_done() -> None:
    done = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a"})
        await asyncio.sleep(0)
        done.append(True)

    async def read_and_wait() -> None:
        assert len(await all_of(app, request("/"))) == 1
        for _ in range(3):
            await asyncio.sleep(0)

    asyncio.run(read_and_wait())
    assert done


def test_no_route() -> None:
    (found,) = asyncio.run(all_of(APP, request("/none")))
    assert isinstance(found, HttpAnswer) and found.status == 404


def test_an_application_that_fails() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise KeyError("no answer")

    with pytest.raises(KeyError, match="no answer"):
        asyncio.run(all_of(app, request("/")))


def test_an_application_that_fails_after_it_has_begun() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        raise KeyError("no more")

    async def read() -> None:
        async with aclosing(answer_of(app, request("/"))) as answer:
            begin = await anext(answer)
            assert isinstance(begin, HttpAnswer) and begin.body == b"a"
            with pytest.raises(KeyError, match="no more"):
                await anext(answer)

    asyncio.run(asyncio.wait_for(read(), 30))


def test_who_stops_reading_cancels() -> None:
    cancelled = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def read_one() -> None:
        async with aclosing(answer_of(app, request("/"))) as answer:
            await anext(answer)
        await asyncio.sleep(0)

    asyncio.run(read_one())
    assert cancelled
