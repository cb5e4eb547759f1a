# SPDX-License-Identifier: Apache-2.0
"""A vLLM engine in a process of its own, driven over a pipe: both ends of it.

Two engines with different attention backends cannot share a process: vLLM keeps the chosen backend,
its metrics and its threads in globals.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
E = TypeVar("E", bound="EngineProcess")

_LOG_TAIL_LINES = 25
_STOP_TIMEOUT_S = 30.0
_POLLING_S = 1.25


class EngineError(RuntimeError):
    """An engine did not start or failed while answering."""


class EngineProcess:
    """An engine that starts in the background; use as a context manager."""

    def __init__(self, name: str, module: str, settings: Any, log_path: Path) -> None:
        """Run `python -m module FD`, which calls `serve`; `settings` are its `start`'s argument."""
        self.name = name
        self.log_path = log_path
        self._connection, other_end = multiprocessing.Pipe()
        with other_end, log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(other_end.fileno())],
                pass_fds=[other_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "VLLM_LOGGING_LEVEL": "INFO"},
                start_new_session=True,  # vLLM's processes can then be ended all together
            )
        self._connection.send(settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop(timeout_s=0.0 if error is not None else _STOP_TIMEOUT_S)

    @property
    def pid(self) -> int:
        return self._process.pid

    def order(self, *request: Any) -> None:
        """Have `answer(llm, *request)` called; do not wait for it."""
        self._connection.send(request)

    def wait(self) -> Any:
        """What the oldest order returned; of the first call: None, when the engine has started.

        Raises:
            EngineError: the engine failed; the message ends with its log.
        """
        try:
            failure, value = self._connection.recv()
        except (EOFError, ConnectionError):
            failure, value = f"its process ended with status {self._process.wait()}", None
        if failure is not None:
            log = self.log_path.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
            raise EngineError(
                f"the {self.name} engine failed: {failure}\nThe end of its log:\n" + "\n".join(log)
            )
        return value

    def ask_to_stop(self) -> None:
        """Let the engine stop when it is idle; do not wait for it."""
        with contextlib.suppress(OSError):
            self._connection.send(None)

    def stop(self, timeout_s: float = _STOP_TIMEOUT_S) -> None:
        """Stop the engine; end its processes by force if that takes longer than `timeout_s`."""
        self.ask_to_stop()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
        self._connection.close()


@contextlib.contextmanager
def running_engines(engines: Iterable[E]) -> Iterator[list[E]]:
    """Engines that have all started; they are stopped together.

    Args:
        engines: made one by one by a generator, so that all are stopped if one cannot be made.

    Raises:
        EngineError: an engine failed; the message ends with its log.
    """
    with contextlib.ExitStack() as stack:
        running: list[E] = []
        for engine in engines:
            stack.enter_context(engine)
            running.append(engine)
        for engine in running:
            engine.wait()
        yield running
        for engine in running:
            engine.ask_to_stop()


def in_turn(items: Iterable[T], round_number: int) -> list[T]:
    """The items, backwards in odd rounds, so that it is not always the same one that begins."""
    return list(items)[:: 1 if round_number % 2 == 0 else -1]


def wait_until_workers_sleep() -> None:
    """Wait until engines that have answered leave the cores to others.

    vLLM's worker polls for its next step during one second (SpinCondition in shm_broadcast.py).
    """
    time.sleep(_POLLING_S)


def _shut_down(llm: Any) -> None:
    llm.llm_engine.engine_core.shutdown()


def serve(
    descriptor: int,
    start: Callable[[Any], T],
    answer: Callable[..., Any],
    stop: Callable[[T], None] = _shut_down,
) -> None:
    """In the process of the engine: answer orders until told to stop or the other end is gone.

    Args:
        start: of the settings; returns an LLM, or what has its `llm_engine`, or what `stop` ends.
    """
    connection = Connection(descriptor)
    llm = None
    with contextlib.suppress(EOFError, ConnectionError):
        try:
            llm = start(connection.recv())
            connection.send((None, None))
            while (request := connection.recv()) is not None:
                connection.send((None, answer(llm, *request)))
        except Exception as error:
            traceback.print_exc()
            connection.send((f"{type(error).__name__}: {error}", None))
        finally:
            if llm is not None:
                stop(llm)
