# SPDX-License-Identifier: Apache-2.0
"""vLLM's server as a replica, without its engine."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_relay.cluster.ray.replica import VllmReplica
from vllm_relay.cluster.ray.tunnel import HttpRequest


class Ended(BaseException):
    """In place of the end of the process."""


def replica_of(app: Any, has_failed: bool) -> Any:
    """What `ask` needs of a replica, without an engine."""
    replica = SimpleNamespace(_app=app, _engine=SimpleNamespace(errored=has_failed))
    replica._end_if_dead = partial(VllmReplica._end_if_dead, replica)
    return replica


async def failing(scope: Any, receive: Any, send: Any) -> None:
    raise KeyError("no answer")


async def answering(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 500, "headers": []})
    await send({"type": "http.response.body", "body": b"a"})


@pytest.mark.parametrize("app", [failing, answering])
def test_a_replica_ends_with_its_engine(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(status: int) -> None:
        raise Ended(status)

    async def ask(has_failed: bool) -> int:
        request = HttpRequest("POST", "/v1/completions", b"", [], b"")
        answer = VllmReplica.ask(replica_of(app, has_failed), request, None)
        return len([each async for each in answer])

    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises(Ended):
        asyncio.run(ask(has_failed=True))
    if app is answering:
        assert asyncio.run(ask(has_failed=False)) == 1
    else:
        with pytest.raises(KeyError, match="no answer"):
            asyncio.run(ask(has_failed=False))
