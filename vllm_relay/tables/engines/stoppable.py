# SPDX-License-Identifier: Apache-2.0
"""Jobs that end when somebody in another thread says so."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from contextvars import copy_context
from typing import TypeVar

from vllm_relay.tables.engines.base import Completions, Engine, Prompt
from vllm_relay.tables.engines.lazy import LazyEngine
from vllm_relay.tables.question import Question

Found = TypeVar("Found")


class JobStoppedError(RuntimeError):
    """A job was stopped; the checkpoint has the answers that came."""


class StoppableEngine(LazyEngine):
    """An `Engine` that takes no prompt and gives no completion once it is stopped.

    Args:
        open_engine: as for `LazyEngine`.
    """

    def __init__(self, open_engine: Callable[[], Engine]) -> None:
        super().__init__(open_engine)
        self._is_stopped = threading.Event()

    def stop(self) -> None:
        """End what runs, when its next prompt is taken or its next completion was; from any
        thread."""
        self._is_stopped.set()

    def resume(self) -> None:
        """Take prompts again."""
        self._is_stopped.clear()

    def generate(self, prompts: Iterable[Prompt], question: Question) -> Completions:
        """See `Engine`.

        Raises:
            JobStoppedError: it was stopped.
        """
        return self._checked(super().generate(self._until_stopped(prompts), question))

    def generate_scored(self, prompts: Iterable[Prompt], question: Question) -> Completions:
        """See `generate`."""
        return self._checked(super().generate_scored(self._until_stopped(prompts), question))

    def _checked(self, completions: Completions) -> Completions:
        with closing(completions):
            for completion in completions:
                yield completion
                self._check()

    def _until_stopped(self, prompts: Iterable[Prompt]) -> Iterator[Prompt]:
        for prompt in prompts:
            self._check()
            yield prompt

    def _check(self) -> None:
        if self._is_stopped.is_set():
            raise JobStoppedError("the job was stopped: a checkpoint keeps the answers that came")


async def in_thread(call: Callable[[], Found], stop: Callable[[], None]) -> Found:
    """What a call gives that runs in a thread of its own, with the task's context variables: the
    span around it is one.

    Where the task is cancelled, `stop` is called, and the cancellation goes on when the call has
    ended.
    """
    executor = ThreadPoolExecutor(1, "relay-job")
    running = asyncio.get_running_loop().run_in_executor(executor, copy_context().run, call)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        stop()
        await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # is told to nobody
        raise
    finally:
        executor.shutdown(wait=False)
