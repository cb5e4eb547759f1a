# SPDX-License-Identifier: Apache-2.0
"""A request as the router and whoever asks know it, and what becomes of it in a replica."""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock
from typing import Any, Generic

from ray import serve
from starlette.responses import JSONResponse

from vllm_relay.cluster.gateway import Gateway, Name, RoutedRequest
from vllm_relay.cluster.requests import RoutablePrompt

CACHE_TOKENS = "cache_tokens"
"""What replicas tell by this name in `record_replica_metadata`: the size of their KV cache,
None where they have none."""

ENDED = b"x-relay-ended"
"""The header of an answer in place of a replica that has ended."""

_KINDS = {
    400: "BadRequestError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


class Asked(Generic[Name]):
    """A request, for the router: give it to a handle as an argument; replicas get None for it.

    Args:
        prompt: of the request.

    Attributes:
        num_routed: how often a replica was chosen for it.
    """

    def __init__(self, prompt: RoutablePrompt) -> None:
        self.prompt = prompt
        self.num_routed = 0
        self._tried: set[Name] = set()
        self._routed: RoutedRequest[Name] | None = None
        self._is_over = False
        self._lock = Lock()  # Serve's router has a thread of its own

    def route(self, gateway: Gateway[Name], among: set[Name]) -> RoutedRequest[Name]:
        """Choose a replica, another one than before if there is one."""
        with self._lock:
            if self._routed is not None:
                self._routed.ended()
            routed = self._routed = gateway.route(self.prompt, among - self._tried or among)
            self._tried.add(routed.replica)
            self.num_routed += 1
            if self._is_over:
                routed.ended()
            return routed

    def answered(self) -> None:
        """The answer begins."""
        with self._lock:
            if self._routed is not None:
                self._routed.answered()

    def ended(self) -> None:
        """The answer is complete, or nobody waits for it any more."""
        with self._lock:
            self._is_over = True
            if self._routed is not None:
                self._routed.ended()

    def __reduce__(self) -> Any:
        return type(None), ()


class Visit:
    """A request that no prompt decides about: give it to a handle as an argument; replicas get
    `to` for it.

    Args:
        to: the id of a replica; None: any.

    Attributes:
        there: ids of all replicas, as the router knew them when it chose one.
    """

    def __init__(self, to: str | None = None) -> None:
        self.to = to
        self.there: list[str] = []

    def choose(self, replicas: Iterable[str]) -> list[str]:
        """Those that it may go to; all where the one that is meant has ended, and they refuse."""
        self.there = list(replicas)
        return [each for each in self.there if each == self.to] or self.there

    def __reduce__(self) -> Any:
        return (type(None), ()) if self.to is None else (str, (self.to,))


def application_for(to: str | None, app: Any) -> Any:
    """What answers a request in this replica: its application, unless another one is meant."""
    if to is None or to == serve.get_replica_context().replica_id.unique_id:
        return app
    return refusal(f"replica {to} has ended: look again", 404, {ENDED.decode(): to})


def refusal(message: str, status: int, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse(error(message, status), status, headers)


def error(message: str, status: int) -> dict[str, Any]:
    """As OpenAI's API and vLLM say it."""
    kind = _KINDS[status]
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
