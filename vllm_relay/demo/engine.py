# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine in a process of its own, driven over a pipe.

Two engines with different attention backends cannot share a process: vLLM keeps the chosen backend,
its metrics and its threads in globals.  `engine_process` is the other end of the pipe.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

_LOG_TAIL_LINES = 25
_STOP_TIMEOUT_S = 30.0


class EngineError(RuntimeError):
    """An engine did not start or failed while answering."""


@dataclass(frozen=True)
class EngineSettings:
    """Everything an engine is started with; `attention_backend` None is vLLM's own choice."""

    model: str
    attention_backend: str | None
    dtype: str
    max_model_len: int
    max_num_seqs: int


@dataclass(frozen=True)
class RoundResult:
    """What one engine did with one round of requests; `counters` are increases of metrics."""

    token_ids: list[list[int]]
    generation_s: float
    counters: dict[str, int]


class Engine:
    """An engine that starts in the background; use as a context manager."""

    def __init__(self, name: str, settings: EngineSettings, log_path: Path) -> None:
        self.name = name
        self.log_path = log_path
        self._connection, other_end = multiprocessing.Pipe()
        with other_end, log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vllm_relay.demo.engine_process", str(other_end.fileno())],
                pass_fds=[other_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # vLLM's processes can then be ended all together
            )
        self._connection.send(settings)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop(timeout_s=0.0 if error is not None else _STOP_TIMEOUT_S)

    def wait_until_ready(self) -> None:
        """Return when the model is loaded.

        Raises:
            EngineError: the engine did not start; the message ends with its log.
        """
        self._receive()

    def generate(self, prompts: list[list[int]], output_tokens: int) -> RoundResult:
        """Continue every prompt greedily by exactly `output_tokens`.

        Raises:
            EngineError: the engine failed; the message ends with its log.
        """
        self._connection.send((prompts, output_tokens))
        return self._receive()

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
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._connection.close()

    def _receive(self) -> Any:
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
