# SPDX-License-Identifier: Apache-2.0
"""How engine cores start, and what is computed before the first request."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any

from vllm_relay.vllm_changes.wrap import wrap


def prepare_new_engines(
    prepare: Callable[[Any], None], prepare_async: Callable[[Any], Awaitable[None]]
) -> None:
    """Call ``prepare(engine)`` when an LLMEngine has started, and ``prepare_async(engine)`` before
    each request of an AsyncLLM. An engine that cannot be prepared takes no request.

    Reason: there is no hook between the start of an engine and its first request, and LLM loads
    plugins when it is too late to wrap it. A server does it earlier, in its endpoint plugins.
    Remove when: vLLM calls plugins when an engine has started.
    """
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine

    def make_init(original: Callable[..., Any]) -> Callable[..., Any]:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            try:
                prepare(self)
            except BaseException:
                self.engine_core.shutdown()
                raise

        return __init__

    def make_add_request(original: Callable[..., Any]) -> Callable[..., Any]:
        async def add_request(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                await prepare_async(self)
            except ValueError as error:  # whose message AsyncLLM.generate would drop
                raise VLLMValidationError(str(error)) from error
            return await original(self, *args, **kwargs)

        return add_request

    wrap(LLMEngine, "__init__", make_init)
    wrap(AsyncLLM, "add_request", make_add_request)


class _InterruptedError(BaseException):
    """A KeyboardInterrupt that vLLM does not know."""


@contextmanager
def interruptible_start() -> Iterator[None]:
    """Let Ctrl-C end the start of an LLM, in the main thread, with a KeyboardInterrupt there and
    nothing in its processes, which have SIGINT blocked.

    Reason: vLLM drops a KeyboardInterrupt while it waits for engine cores, and waits on; and Ctrl-C
    reaches every process of a terminal, of which each that is still importing prints a traceback.
    Who has started them ends them with SIGTERM.
    Remove when: zmq_socket_ctx raises what it was interrupted by, and vLLM's processes take no
    SIGINT before they handle it.
    """
    from vllm.v1.engine.utils import CoreEngineProcManager

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            resource_tracker.ensure_running()  # which unblocks it when it starts
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                original(self, *args, **kwargs)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)

        return __init__

    def interrupt(*_: Any) -> None:
        raise _InterruptedError

    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a job in the background of a script
        yield
        return
    wrap(CoreEngineProcManager, "__init__", make)
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except _InterruptedError:
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGINT, before)
