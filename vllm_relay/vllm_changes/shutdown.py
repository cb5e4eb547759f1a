# SPDX-License-Identifier: Apache-2.0
"""How what is open ends when a server is told to end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_relay.vllm_changes.wrap import wrap


def end_open_requests(wait_s: int) -> None:
    """When an AsyncLLM shuts down, end its open requests and calls of the engine core with an error
    that servers answer with 503, and let servers wait ``wait_s`` for connections that stay open.

    Reason: AsyncLLM.shutdown cancels the task that hands out outputs, often before it has read that
    the engine is dead, and a cancelled one tells nobody: requests wait for ever, as calls of the
    engine core always do. uvicorn waits for their connections, and for those of clients that never
    send the rest of a request, and no signal ends it. Where the task does read it, all requests get
    one exception, whose traceback grows with each that logs it. And a server looks for processes
    that use its port: an engine core that is a fork does, and may end before it is asked its name.
    Remove when: AsyncLLM.shutdown ends what is open, and vLLM gives uvicorn a
    timeout_graceful_shutdown and expects processes to end.
    """
    import psutil
    from vllm.entrypoints.launchers import launcher
    from vllm.exceptions import RetryableRequestError
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.exceptions import EngineDeadError

    class ShuttingDownError(EngineDeadError, RetryableRequestError):
        def __str__(self) -> str:
            return "the server is shutting down: ask again later"

    def make_engine(original: Callable[..., Any]) -> Callable[..., Any]:
        def shutdown(self: Any, *args: Any, **kwargs: Any) -> None:
            output_handler = getattr(self, "output_handler", None)
            if output_handler is None or output_handler.get_loop().is_closed():
                return original(self, *args, **kwargs)
            requests = self.output_processor.request_states
            calls = self.engine_core.utility_results

            def end(error: Exception | None = None) -> None:
                for request in requests.values():
                    request.queue.put(ShuttingDownError())
                for call in calls.values():
                    if not call.done():
                        call.set_exception(ShuttingDownError())

            self.output_processor.propagate_error = end
            try:
                return original(self, *args, **kwargs)
            finally:
                output_handler.get_loop().call_soon_threadsafe(end)

        return shutdown

    def make_server(original: Callable[..., Any]) -> Callable[..., Any]:
        async def shutdown(self: Any, *args: Any, **kwargs: Any) -> None:
            if self.config.timeout_graceful_shutdown is None:
                self.config.timeout_graceful_shutdown = wait_s
            await original(self, *args, **kwargs)

        return shutdown

    def make_search(original: Callable[..., Any]) -> Callable[..., Any]:
        def find_process_using_port(*args: Any, **kwargs: Any) -> Any:
            process = original(*args, **kwargs)
            if process is not None:
                try:
                    command = process.cmdline()
                except psutil.Error:
                    return None
                process.cmdline = lambda: command
            return process

        return find_process_using_port

    wrap(AsyncLLM, "shutdown", make_engine)
    wrap(launcher.NoSignalServer, "shutdown", make_server)
    wrap(launcher, "find_process_using_port", make_search)
