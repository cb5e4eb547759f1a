# SPDX-License-Identifier: Apache-2.0
"""The page of all replicas where some are late, refuse or fail, without Ray's processes."""

from __future__ import annotations

import asyncio
import json
import selectors
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import RayActorError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.responses import Response, StreamingResponse

from tests.cluster.ray.answers import NEVER, Answer
from vllm_relay.cluster.ray import page
from vllm_relay.cluster.ray.asked import ENDED, Visit
from vllm_relay.cluster.ray.page import ReplicaPages
from vllm_relay.cluster.ray.tunnel import HttpAnswer, HttpRequest

T = TypeVar("T")

BUSY = BackPressureError(3, 3)


def begin(body: bytes, status: int = 200, name: bytes = b"x-name") -> HttpAnswer:
    return HttpAnswer(status, [(name, b"value")], body, status == 200)


def event(kind: str, **data: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n".encode()


HELLO = begin(event("hello", sources=[{"id": "0"}]))
REFUSED = begin(b"no key", 401)
ELSEWHERE = begin(b"has ended", 404, ENDED)
PINS = begin(b'{"pins": [{"id": "mine"}]}')


class Handle:
    """Of replicas that are asked who is there, and give what is in `answers`: items, of which
    exceptions are raised."""

    def __init__(self, **answers: list[Any]) -> None:
        self.answers = answers
        self.lookups: Iterator[Any] = iter(())
        """What happens when they are asked who is there, None: they say so, as after the last."""
        self.asked: list[tuple[str, str]] = []

    def remote(self, request: HttpRequest, visit: Visit) -> Any:
        visit.choose(self.answers)
        if visit.to is None:
            return Answer([next(self.lookups, None) or begin(b"")])
        self.asked.append((request.method, request.path))
        return Answer(self.answers[visit.to])


class Clock(selectors.DefaultSelector):
    """Of a loop: nobody waits, and time goes on only where nothing else happens."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "it would wait for ever"
        self.now_s += max(timeout, 0.0)
        return super().select(0)


def run(wanted: Coroutine[Any, Any, T]) -> T:
    def loop() -> asyncio.AbstractEventLoop:
        clock = Clock()
        made = asyncio.SelectorEventLoop(clock)
        made.time = lambda: clock.now_s
        return made

    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(wanted)


def asked(handle: Handle, path: str, method: str = "GET", body: bytes = b"") -> Response:
    request = HttpRequest(method, f"/relay/{path}", b"", [], body)
    return run(ReplicaPages(handle).answer(request))


def message(response: Response) -> str:
    return json.loads(bytes(response.body))["error"]["message"]


def told(handle: Handle, num: int | None = None) -> list[str] | Response:
    """The first events, all where no number is given, or what is said instead."""

    async def read() -> list[str] | Response:
        unfetched: list[Any] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: unfetched.append(context))
        request = HttpRequest("GET", "/relay/forest/events", b"", [], b"")
        response = await ReplicaPages(handle).answer(request)
        if not isinstance(response, StreamingResponse):
            assert not unfetched
            return response
        events: list[str] = []
        async for each in response.body_iterator:
            events.append(str(each))
            if len(events) == num:
                break
        assert not unfetched
        return events

    return run(read())


@pytest.mark.parametrize(
    "gone", [[NEVER], [PINS, NEVER], [RayActorError()], [PINS, RayActorError()], [], [ELSEWHERE]]
    + [[BUSY]]
)  # fmt: skip
def test_pins_of_those_that_answer(gone: list[Any]) -> None:
    found = asked(Handle(a=gone, b=[PINS]), "pins")
    assert (found.status_code, json.loads(bytes(found.body))) == (200, {"pins": [{"id": "b:mine"}]})
    refused = asked(Handle(a=gone, b=[REFUSED]), "pins")
    assert (refused.status_code, refused.body) == (401, b"no key")


def test_replicas_of_which_none_tells_its_pins_are_named() -> None:
    refused = asked(Handle(a=[NEVER], b=[RayActorError()], c=[ELSEWHERE], d=[BUSY]), "pins")
    assert refused.status_code == 503
    for part in ("a has not answered for 10 s", "b has ended or failed", "c has ended",
                 "d is not reached (BackPressureError: Request dropped"):  # fmt: skip
        assert part in message(refused)


@pytest.mark.parametrize(
    ("answers", "status", "said"),
    [
        ({"a": [NEVER], "b": [NEVER]}, 503, "a has not answered for 10 s, b has not"),
        ({"a": [begin(b": keep-alive\n\n"), NEVER]}, 503, "a has not answered"),
        ({"a": [REFUSED], "b": [REFUSED]}, 401, "no key"),
        ({"a": [REFUSED], "b": [NEVER]}, 401, "no key"),
        ({"a": [REFUSED], "b": [RayActorError()]}, 401, "no key"),
        ({"a": [ELSEWHERE], "b": [REFUSED]}, 401, "no key"),
        ({"a": [RayActorError()], "b": [ELSEWHERE]}, 503, "a has ended or failed, b has ended"),
        ({"a": [begin(b"")]}, 503, "a has ended"),
        ({"a": []}, 503, "a has ended or failed"),
        ({"a": [BUSY]}, 503, "num_queued_requests=3"),
        ({"a": [begin(b"data: {\n\n")]}, 503, "KeyError: the endpoint's log says why"),
    ],
)
def test_what_is_said_before_the_first_event_is_no_stream(
    answers: dict[str, list[Any]], status: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "_KEEP_ALIVE_S", 1.0)
    response = told(Handle(**answers))
    assert isinstance(response, Response)
    assert response.status_code == status and said in bytes(response.body).decode()


def test_who_refuses_later_does_not_end_the_stream() -> None:
    events = told(Handle(a=Turns([HELLO, RayActorError()], [REFUSED], [HELLO, NEVER])), num=4)
    assert isinstance(events, list)
    kinds = ["event: hello", "event: gone", "event: hello", ": keep-alive"]
    assert [each.split("\n")[0] for each in events] == kinds


class Turns(list[Any]):
    """Items that are others each time that they are read."""

    def __init__(self, *turns: list[Any]) -> None:
        super().__init__()
        self._turns = iter(turns)

    def __iter__(self) -> Iterator[Any]:
        return iter(next(self._turns))


@pytest.mark.parametrize("failure", [BUSY, DeploymentUnavailableError(DeploymentID("replica"))])
def test_replicas_that_can_be_asked_no_more_end_the_stream(failure: Exception) -> None:
    """And those that cannot be asked at all are no stream."""
    handle = Handle(a=[HELLO, NEVER])
    handle.lookups = iter([failure])
    refused = told(handle)
    assert isinstance(refused, Response) and refused.status_code == 503
    assert type(failure).__name__ in message(refused)

    handle.lookups = iter([None, failure])
    events = told(handle)
    assert isinstance(events, list)
    hello, end = events
    assert hello.startswith("event: hello\n") and end.startswith("event: error\n")
    said = json.loads(end.split("data: ")[1])
    assert said["code"] == 503 and type(failure).__name__ in said["message"]


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("forest/events", "GET"),
        ("forest/evict", "POST"),
        ("pins", "GET, POST"),
        ("pins/a:mine", "DELETE"),
    ],
)
def test_other_methods_are_refused(path: str, allowed: str) -> None:
    handle = Handle(a=[PINS])
    for method in {"GET", "HEAD", "POST", "PUT", "DELETE"} - set(allowed.split(", ")):
        refused = asked(handle, path, method, b'{"source": "a:0", "node": 1}')
        assert (refused.status_code, refused.headers["allow"]) == (405, allowed)
        assert f"given {method}, expected {allowed}" in message(refused)
    assert not handle.asked


def events_of(parts: list[bytes]) -> list[tuple[str, Any]]:
    async def read() -> list[tuple[str, Any]]:
        return [each async for each in page._events_of(parts[0], Answer(parts[1:]))]

    return run(read())


@given(
    st.lists(st.dictionaries(st.text(max_size=3), st.text(max_size=9), max_size=3), max_size=5),
    st.lists(st.integers(0, 200), max_size=20),
)
def test_events_come_in_any_parts(data: list[dict[str, str]], cuts: list[int]) -> None:
    stream = b"".join(
        b"id: 1\n" + f"event: e{place}\ndata: {json.dumps(each)}\n\n: keep-alive\n\n".encode()
        for place, each in enumerate(data)
    )
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    parts = [stream[a:b] for a, b in zip(places, places[1:], strict=False)]
    assert events_of(parts) == [(f"e{place}", each) for place, each in enumerate(data)]


@contextmanager
def searched_bytes(by: Callable[[int], None]) -> Iterator[None]:
    """Tells how long each value is whose methods are called."""

    def note(frame: Any, kind: str, function: Any) -> None:
        value = getattr(function, "__self__", None)
        if kind == "c_call" and isinstance(value, bytes | bytearray):
            by(len(value))

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def test_a_long_event_is_searched_once() -> None:
    """And not with each part again, which were 500 times."""
    stream = event("snapshot", text="x" * 100_000)
    parts = [stream[place : place + 100] for place in range(0, len(stream), 100)]
    lengths: list[int] = []
    with searched_bytes(lengths.append):
        [(kind, data)] = events_of(parts)
    assert (kind, len(data["text"])) == ("snapshot", 100_000)
    assert len(stream) <= sum(lengths) < 20 * len(stream)
