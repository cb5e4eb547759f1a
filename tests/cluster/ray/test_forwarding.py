# SPDX-License-Identifier: Apache-2.0
"""What the endpoint does with answers, and what routers are told, without Ray's processes."""

from __future__ import annotations

import asyncio
import json
import pickle
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from ray.exceptions import RayActorError
from ray.serve._private.common import DeploymentID
from ray.serve.request_router import ReplicaID

from tests.cluster.ray.answers import NEVER, Answer
from vllm_relay.cluster.gateway import Gateway
from vllm_relay.cluster.ray import endpoint
from vllm_relay.cluster.ray.asked import Asked, Visit
from vllm_relay.cluster.ray.endpoint import MAX_TRIES, Forwarded
from vllm_relay.cluster.ray.router import PrefixRouter
from vllm_relay.cluster.ray.tunnel import HttpAnswer, HttpRequest
from vllm_relay.cluster.requests import RoutablePrompt

PROMPT = RoutablePrompt((), 8, 10)
REQUEST = HttpRequest("POST", "/v1/completions", b"", [], b'{"prompt": "a"}')


class Handle:
    """Of replicas, of which each gives one of `answers`: items, the last of which may be raised."""

    def __init__(self, *answers: list[Any]) -> None:
        self.gateway = Gateway(["a", "b"])
        self.asked: list[Asked[str]] = []
        self.num_cancelled = 0
        self._answers = iter(answers)

    def remote(self, request: HttpRequest, asked: Asked[str]) -> Any:
        asked.route(self.gateway, {"a", "b"})
        self.asked.append(asked)
        return Answer(next(self._answers), self._cancel)

    def _cancel(self) -> None:
        self.num_cancelled += 1

    @property
    def load_tokens(self) -> float:
        return sum(map(self.gateway.load_tokens, "ab"))


def sent(handle: Handle, request: HttpRequest = REQUEST) -> tuple[int, bytes, bool]:
    """Status, body, and whether it is complete."""
    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    async def receive() -> Any:
        raise AssertionError("the body is read before")

    asyncio.run(Forwarded(handle, request)({"type": "http"}, receive, send))
    start, *rest = messages
    return (
        start["status"],
        b"".join(each["body"] for each in rest),
        not rest[-1].get("more_body", False),
    )


def begin(body: bytes, kind: bytes = b"text/event-stream") -> HttpAnswer:
    return HttpAnswer(200, [(b"content-type", kind)], body, True)


def test_whoever_asks_for_health_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "HEALTH_TIMEOUT_S", 0.01)
    handle = Handle([NEVER])
    status, body, is_complete = sent(handle, HttpRequest("GET", "/health", b"", [], b""))
    assert (status, is_complete) == (503, True) and b"no replica has answered" in body
    assert handle.num_cancelled == 1 and handle.load_tokens == 0


def test_an_answer_that_has_not_begun_is_asked_for_elsewhere() -> None:
    handle = Handle([RayActorError()], [begin(b"one "), b"two"])
    assert sent(handle) == (200, b"one two", True)
    assert len(handle.asked) == 2 and handle.asked[0] is handle.asked[1]
    assert handle.load_tokens == 0 and handle.num_cancelled == 1


def test_what_ends_every_replica_is_given_up() -> None:
    handle = Handle(*[[RayActorError()]] * MAX_TRIES)
    status, body, is_complete = sent(handle)
    assert (status, is_complete) == (503, True)
    assert json.loads(body)["error"]["message"].startswith("3 replicas ended")
    assert len(handle.asked) == MAX_TRIES and handle.load_tokens == 0


def test_what_fails_is_asked_for_once() -> None:
    for failure in ([RuntimeError("a detail")], []):
        handle = Handle(failure)
        status, body, is_complete = sent(handle)
        assert (status, is_complete, len(handle.asked)) == (500, True, 1)
        error = json.loads(body)["error"]
        assert error["type"] == "InternalServerError" and "detail" not in error["message"]
        assert handle.load_tokens == 0


def test_what_has_begun_is_asked_for_once() -> None:
    handle = Handle([begin(b"one\n\n"), RayActorError()])
    status, body, is_complete = sent(handle)
    assert (status, is_complete) == (200, True)
    first, error, done = body.strip().split(b"\n\n")
    assert (first, done) == (b"one", b"data: [DONE]")
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == 500
    whole = Handle([begin(b'{"a":', b"application/json"), RayActorError()])
    with pytest.raises(RayActorError):
        sent(whole)
    assert len(handle.asked) == len(whole.asked) == 1
    assert handle.load_tokens == whole.load_tokens == 0


def test_a_request_asks_each_replica_once_before_any_twice() -> None:
    gateway = Gateway(["a", "b", "c"])
    asked: Asked[str] = Asked(PROMPT)
    tried = [asked.route(gateway, {"a", "b", "c"}).replica for _ in range(3)]
    assert sorted(tried) == ["a", "b", "c"]
    assert sum(map(gateway.load_tokens, "abc")) == 18, "it is in one place at a time"
    assert asked.route(gateway, {"b"}).replica == "b"
    asked.answered()
    assert gateway.load_tokens("b") == 10
    asked.ended()
    assert sum(map(gateway.load_tokens, "abc")) == 0


def test_who_leaves_before_a_replica_is_chosen_leaves_no_load() -> None:
    gateway = Gateway(["a"])
    asked: Asked[str] = Asked(PROMPT)
    asked.answered()
    asked.ended()
    asked.route(gateway, {"a"})
    assert gateway.load_tokens("a") == 0


def test_tokens_of_a_request_are_counted_once() -> None:
    router = object.__new__(PrefixRouter)
    router._gateway = Gateway(map(replica_id, "ab"))
    router._load, router._prompt, router._cached = Mock(), Mock(), Mock()
    replicas: Any = [SimpleNamespace(replica_id=replica_id(name)) for name in "ab"]
    pending: Any = SimpleNamespace(args=[Asked(PROMPT)], kwargs={}, routing_context=Mock())
    chosen = [asyncio.run(router.choose_replicas(replicas, pending))[0][0] for _ in range(3)]
    assert {each.replica_id.unique_id for each in chosen} == {"a", "b"}
    router._prompt.inc.assert_called_once_with(8, {"to_replica": chosen[0].replica_id.unique_id})
    assert router._load.set.call_count == 3


def replica_id(name: str) -> ReplicaID:
    return ReplicaID(name, DeploymentID("replica"))


def test_replicas_are_not_sent_what_routers_know() -> None:
    assert pickle.loads(pickle.dumps(Asked(PROMPT))) is None


@pytest.mark.parametrize("given", [(), (Visit(),), (Visit("a"),), (Asked(PROMPT),)])
def test_who_cannot_be_reached_is_asked_again_after_a_pause(given: tuple[Any, ...]) -> None:
    """Else Ray Serve asks for another choice until its own loop has no time for anything else."""
    router = object.__new__(PrefixRouter)
    router._gateway = Gateway()
    replicas: Any = [SimpleNamespace(replica_id=replica_id(name)) for name in "ab"]
    context = SimpleNamespace(should_backoff=False)
    pending: Any = SimpleNamespace(args=given, kwargs={}, routing_context=context)
    [chosen] = asyncio.run(router.choose_replicas(replicas, pending))
    assert context.should_backoff
    to_a = bool(given) and getattr(given[0], "to", None) == "a"
    assert chosen == (replicas[:1] if to_a else replicas)


def test_a_visit_of_one_that_has_ended_goes_to_the_others() -> None:
    visit = Visit("c")
    assert visit.choose(["a", "b"]) == ["a", "b"] and visit.there == ["a", "b"]
    assert [pickle.loads(pickle.dumps(each)) for each in (visit, Visit())] == ["c", None]
