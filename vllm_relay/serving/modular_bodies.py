# SPDX-License-Identifier: Apache-2.0
"""The bodies of requests with modules, before vLLM reads them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_relay.serving.modular_requests import FIELD, STAND_IN_PROMPT
from vllm_relay.serving.requests import error_response, route_path, too_long

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_STAND_INS: dict[str, tuple[str, Any]] = {
    "/v1/completions": ("prompt", STAND_IN_PROMPT),
    "/v1/chat/completions": ("messages", []),
}
_LONG_BYTES = 1 << 16
_WITHOUT_MODULES = ("/v1/responses", "/v1/messages", "/tokenize")


class ModularBodies:
    """Lets requests with the field `relay` leave out `prompt` and `messages`, which vLLM wants, and
    refuses the field where vLLM would ignore it.

    Args:
        max_bytes: of a body with the field.
    """

    def __init__(self, app: ASGIApp, max_bytes: Callable[[], int]) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = route_path(scope)
        if path not in (*_STAND_INS, *_WITHOUT_MODULES) or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        messages: list[Message] = []
        while not messages or messages[-1].get("more_body"):
            messages.append(await receive())
            if messages[-1]["type"] != "http.request":
                break
        body = b"".join(each.get("body", b"") for each in messages)
        if len(body) < _LONG_BYTES:
            request = _modular(body)
        else:  # others would wait for it
            request = await asyncio.to_thread(_modular, body)
        if request is not None:
            max_bytes = self._max_bytes()
            if len(body) > max_bytes:
                await error_response(413, too_long(max_bytes))(scope, receive, send)
                return
            if path in _WITHOUT_MODULES:
                paths = " and ".join(_STAND_INS)
                refusal = error_response(400, f"{FIELD}: only {paths} take prompts with modules")
                await refusal(scope, receive, send)
                return
            field, stand_in = _STAND_INS[path]
            if request.get(field) is None:
                body = json.dumps({**request, field: stand_in}).encode()
                headers = [each for each in scope["headers"] if each[0] != b"content-length"]
                scope["headers"] = [*headers, (b"content-length", str(len(body)).encode())]
                messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again() -> Message:
            return messages.pop(0) if messages else await receive()

        await self._app(scope, receive_again, send)


def _modular(body: bytes) -> dict[str, Any] | None:
    """A request with the field `relay`; None: another, or nothing that can be read."""
    if f'"{FIELD}"'.encode() not in body:
        return None
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return None  # vLLM says what is wrong
    return request if isinstance(request, dict) and request.get(FIELD) is not None else None
