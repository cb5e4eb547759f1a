# SPDX-License-Identifier: Apache-2.0
"""Engines that are opened when they are first needed, and whose jobs end when another thread says
so."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from contextvars import copy_context
from functools import cached_property
from typing import Any, TypeVar

from vllm_relay.tables.engines.base import Completions, Engine, Prompt, PromptShape, generate
from vllm_relay.tables.engines.opening import is_engine, open_engine
from vllm_relay.tables.ordering.cached_tokens import BlockCache
from vllm_relay.tables.question import Question

Found = TypeVar("Found")


def engine_of(given: Any, cleanup: ExitStack, replicas: int | None = None) -> Engine:
    """An engine as it is, or one that is opened when it is needed, see `open_engine`."""
    if is_engine(given) and replicas is None:
        return given
    opened = LazyEngine(lambda: open_engine(given, replicas=replicas))
    cleanup.callback(opened.close)
    return opened


class LazyEngine:
    """An `Engine`: statements that do not ask need none.

    Args:
        open_engine: is called when an engine is needed and there is none.
    """

    # found by `__getattr__`, as what else an engine may have
    identity: str
    tokenizer: Any | None
    cache: BlockCache | None
    max_model_len: int | None

    def __init__(self, open_engine: Callable[[], Engine]) -> None:
        self._open_engine = open_engine

    @cached_property
    def _engine(self) -> Engine:
        return self._open_engine()

    def __getattr__(self, name: str) -> Any:
        """The attributes of the engine."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._engine, name)

    def open(self) -> None:
        """Open it now."""
        _ = self._engine

    def generate(self, prompts: Iterable[Prompt], question: Question) -> Completions:
        return self._engine.generate(prompts, question)

    def generate_scored(self, prompts: Iterable[Prompt], question: Question) -> Completions:
        return generate(self._engine, prompts, question, is_scored=True)

    def max_answer_tokens(self, question: Question) -> int:
        return self._engine.max_answer_tokens(question)

    def prompts_per_s(self, shape: PromptShape, question: Question) -> float | None:
        return self._engine.prompts_per_s(shape, question)

    def close(self) -> None:
        """Close the engine, if it was opened; another one is opened when it is needed."""
        if "_engine" in vars(self):
            self._engine.close()
            del self._engine


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
