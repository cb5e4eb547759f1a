# SPDX-License-Identifier: Apache-2.0
"""Requests to an endpoint on this machine."""

from __future__ import annotations

import http.client
import json
from typing import Any

ANSWER_TIMEOUT_S = 120.0


def connected(port: int, body: Any, path: str = "/v1/completions") -> http.client.HTTPResponse:
    """The answer, whose parts each come in `ANSWER_TIMEOUT_S`."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_TIMEOUT_S)
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, text, {"x-given": "kept", "content-type": "application/json"})
    return connection.getresponse()
