# SPDX-License-Identifier: Apache-2.0
"""Prompts answered by coroutines, for a caller that has none: an event loop in a thread."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, TypeAlias, TypeVar

from vllm_relay.tables.engines.base import Completion, Prompt

AnswerPrompt: TypeAlias = "Callable[[Prompt], Awaitable[Completion]]"
Result = TypeVar("Result")


def run_in_thread(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """What a coroutine returns, whether or not this thread runs an event loop."""
    with ThreadPoolExecutor(max_workers=1) as executor:
        return executor.submit(asyncio.run, coroutine).result()


class AnsweringThread:
    """Prompts begin in the order in which they are submitted.

    Args:
        open_client: makes what answers a prompt; entered and left in the thread's event loop.
        max_running: prompts that are answered at once.
    """

    def __init__(
        self,
        open_client: Callable[[], AbstractAsyncContextManager[AnswerPrompt]],
        max_running: int,
    ) -> None:
        self._prompts: asyncio.Queue[Prompt] = asyncio.Queue()
        self._results: queue.SimpleQueue[Completion | BaseException] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self._answer_all(open_client, max_running))
        # of a caller that never closes it, the interpreter still ends
        self._thread = threading.Thread(target=self._run, name="relay-server-engine", daemon=True)
        self._thread.start()

    def submit(self, prompt: Prompt) -> None:
        """Answer this prompt when there is room; after an error, do nothing."""
        self._call_in_loop(self._prompts.put_nowait, prompt)

    @property
    def has_result(self) -> bool:
        """Whether `result` returns at once."""
        return not self._results.empty()

    def result(self) -> Completion:
        """The next completion; waits for it.

        Raises:
            Exception: what a coroutine raised; nothing is answered any more.
        """
        result = self._results.get()
        if isinstance(result, Completion):
            return result
        raise result

    def close(self) -> None:
        """Abort what runs; returns when the thread has ended."""
        self._call_in_loop(self._task.cancel)
        self._thread.join()

    def _call_in_loop(self, function: Callable[..., object], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *arguments)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._task)
        except BaseException as error:
            self._results.put(error)
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    async def _answer_all(
        self,
        open_client: Callable[[], AbstractAsyncContextManager[AnswerPrompt]],
        max_running: int,
    ) -> None:
        async with open_client() as answer:
            workers = [asyncio.create_task(self._work(answer)) for _ in range(max_running)]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self, answer: AnswerPrompt) -> None:
        while True:
            prompt = await self._prompts.get()
            self._results.put(await answer(prompt))
