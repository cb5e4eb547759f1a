# SPDX-License-Identifier: Apache-2.0
"""Requests to an endpoint on this machine."""

from __future__ import annotations

import http.client
import json
from typing import Any

ANSWER_TIMEOUT_S = 120.0


def connected(
    port: int,
    body: Any,
    path: str = "/v1/completions",
    method: str = "POST",
    authorization: str = "",
) -> http.client.HTTPResponse:
    """The answer, whose parts each come in `ANSWER_TIMEOUT_S`."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_TIMEOUT_S)
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"x-given": "kept", "content-type": "application/json"}
    headers |= {"authorization": authorization} if authorization else {}
    connection.request(method, path, text, headers)
    return connection.getresponse()


def answer(port: int, method: str, path: str, body: Any = None, **more: Any) -> tuple[int, Any]:
    """Status and JSON."""
    found = connected(port, b"" if body is None else body, path, method, **more)
    text = found.read()
    return found.status, json.loads(text) if text else None


def next_event(stream: http.client.HTTPResponse) -> tuple[str, Any]:
    """The next event of a stream that is no comment."""
    while not (kind := stream.readline()).startswith(b"event: "):
        assert kind, "the stream has ended"
    data = stream.readline()
    return kind.decode().strip()[7:], json.loads(data.removeprefix(b"data: "))
