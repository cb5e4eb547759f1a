# SPDX-License-Identifier: Apache-2.0
"""Engines that compute something before their first request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any


def cancel_the_first_of_two(
    engine: Any, start: Callable[..., Coroutine[Any, Any, None]], online_renderer: Any
) -> None:
    """Ask for the start twice, and cancel the first while its requests run: the second waits for
    them, and a third has nothing to do."""
    generate, goes_on = engine.generate, asyncio.Event()

    async def generate_later(*args: Any, **more: Any) -> AsyncIterator[None]:
        await goes_on.wait()
        async for output in generate(*args, **more):
            yield output

    engine.generate = generate_later

    async def cancel_and_wait() -> None:
        first = asyncio.create_task(start(engine, online_renderer))
        second = asyncio.create_task(start(engine))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        assert not second.done()
        goes_on.set()
        await second
        await start(engine)

    asyncio.run(cancel_and_wait())
