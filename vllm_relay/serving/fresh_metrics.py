# SPDX-License-Identifier: Apache-2.0
"""Metrics that are true when they are read: statistics come from the engine with steps only."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from vllm_relay.serving.requests import route_path

if TYPE_CHECKING:
    from argparse import Namespace

    from fastapi import FastAPI
    from starlette.types import ASGIApp, Receive, Scope, Send

_PATH = "/metrics"
_MAX_WAIT_S = 1.0
"""A step that takes longer keeps the page no longer: it then has what was known before."""


class FreshMetrics:
    """Implements vLLM's EndpointPlugin.

    Args:
        refresh: called with the server's engine before its metrics are read.
    """

    name = "relay-metrics"
    required_tasks = ("generate",)

    def __init__(self, refresh: Callable[[Any], Awaitable[None]]) -> None:
        self._refresh = refresh

    def attach_router(self, app: FastAPI) -> None:
        app.add_middleware(_Refreshing, refresh=self._refresh)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        pass


class _Refreshing:
    def __init__(self, app: ASGIApp, refresh: Callable[[Any], Awaitable[None]]) -> None:
        self._app = app
        self._refresh = refresh

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if route_path(scope).rstrip("/") == _PATH:
            engine = getattr(scope["app"].state, "engine_client", None)
            if engine is not None:
                refreshing = asyncio.ensure_future(self._refresh(engine))
                # a dead engine does not keep its metrics from being read
                refreshing.add_done_callback(lambda done: done.cancelled() or done.exception())
                await asyncio.wait([refreshing], timeout=_MAX_WAIT_S)
        await self._app(scope, receive, send)
