# SPDX-License-Identifier: Apache-2.0
"""An event loop for callers that have none, or whose own is busy with them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

Result = TypeVar("Result")


class LoopThread:
    """Made by `loop_in_thread`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def start(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run it beside others; they begin in the order in which they are started."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """What it returns."""
        return self.start(coroutine).result()

    def cancel_all(self) -> None:
        """End what runs; returns when it has ended."""
        self.run(_cancel_others())


@contextmanager
def loop_in_thread() -> Iterator[LoopThread]:
    """A loop in a thread of its own; what still runs at the end is cancelled."""
    loop = asyncio.new_event_loop()
    # of a caller that never ends it, the interpreter still does
    thread = threading.Thread(target=loop.run_forever, name="relay-server-engine", daemon=True)
    thread.start()
    found = LoopThread(loop)
    try:
        yield found
    finally:
        found.cancel_all()
        found.run(loop.shutdown_default_executor())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _cancel_others() -> None:
    tasks = [each for each in asyncio.all_tasks() if each is not asyncio.current_task()]
    for each in tasks:
        each.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
