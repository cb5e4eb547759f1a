# SPDX-License-Identifier: Apache-2.0
"""Processes that have vLLM when they begin: forks of one that has imported it, which takes as long
as all else that a small engine does."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [
        "vllm.entrypoints.llm",
        "vllm.model_executor.models.llama",
        "vllm.v1.engine.core",
        "vllm.v1.core.sched.async_scheduler",
        "vllm.v1.worker.cpu_worker",
        "vllm.model_executor.layers.quantization.online",
        "vllm.triton_utils.dispatcher",
        "vllm_relay.attention_backends.relay",
        "vllm_relay.long_context.scheduler",
        "vllm_relay.metrics",
        "vllm_relay.modules.worker",
        "tests.support.frozen_heap",
    ]
)


def start(
    target: Callable[..., None],
    *arguments: Any,
    stdout: Path,
    stderr: Path,
    environment: Mapping[str, str],
    forks: bool = False,
) -> BaseProcess:
    """Calls `target(*arguments)`, which can be pickled, in a new process.

    Args:
        environment: beside what this process has. What modules read when they are imported is read
            before it is set.
        forks: vLLM's own processes are forks of the new one too, and import nothing again. What it
            sends to a process that it spawns is then not pickled.
    """
    for path in (stdout, stderr):
        path.touch()
    changed = {**os.environ, **environment}
    process = context.Process(target=_run, args=(target, arguments, stdout, stderr, changed, forks))
    process.start()
    return process


def run_module(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    timeout_s: float = 300,
    *,
    forks: bool = False,
) -> subprocess.CompletedProcess[str]:
    """As `python -m module arguments...`; `forks` as in `start`."""
    argv = [module, *arguments]
    with tempfile.TemporaryDirectory() as folder:
        stdout, stderr = Path(folder, "stdout"), Path(folder, "stderr")
        process = start(
            run_main, *argv, stdout=stdout, stderr=stderr, environment=environment, forks=forks
        )
        try:
            process.join(timeout_s)
            status = process.exitcode
        finally:
            process.kill()  # if it has not ended
            process.join()
        output = stdout.read_text(), stderr.read_text()
        if status is None:
            raise subprocess.TimeoutExpired(argv, timeout_s, *output)
        return subprocess.CompletedProcess(argv, status, *output)


class WarmPopen:
    """`subprocess.Popen` of `python -m MODULE FD` in a session of its own."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        pass_fds: Sequence[int],
        stdin: int,
        stdout: IO[bytes],
        stderr: int,
        env: Mapping[str, str],
        start_new_session: bool,
    ) -> None:
        _, _, module, _ = command
        [descriptor] = pass_fds
        assert (stdin, stderr, start_new_session) == (subprocess.DEVNULL, subprocess.STDOUT, True)
        log = Path(stdout.name)
        with Connection(os.dup(descriptor)) as inherited:
            self._process = start(
                _run_in_session, module, inherited, stdout=log, stderr=log, environment=env
            )
        self.pid = self._process.pid

    def wait(self, timeout_s: float | None = None) -> int:
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("an engine", timeout_s or 0.0)
        return self._process.exitcode


WARM_SUBPROCESS = SimpleNamespace(
    Popen=WarmPopen,
    DEVNULL=subprocess.DEVNULL,
    STDOUT=subprocess.STDOUT,
    TimeoutExpired=subprocess.TimeoutExpired,
)
"""What `vllm_relay.demo.engine_process` needs of `subprocess`."""


def _run_in_session(module: str, inherited: Connection) -> None:
    os.setsid()
    run_main(module, str(inherited.fileno()))


def _run(
    target: Callable[..., None],
    arguments: Sequence[Any],
    stdout: Path,
    stderr: Path,
    environment: Mapping[str, str],
    forks: bool,
) -> None:
    for path, descriptor in ((stdout, 1), (stderr, 2)):
        with path.open("ab") as file:
            os.dup2(file.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    if forks:
        get_context = multiprocessing.get_context
        # on CPUs vLLM wants "spawn", whatever its options say
        multiprocessing.get_context = lambda method=None: get_context(method and "fork")
    try:
        target(*arguments)
    finally:
        # multiprocessing leaves them out, and vLLM ends its own processes in them
        atexit._run_exitfuncs()


def run_main(module: str, *arguments: str) -> None:
    """In this process, as `python -m module arguments...`."""
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
