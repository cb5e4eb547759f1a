# SPDX-License-Identifier: Apache-2.0
"""Processes that have vLLM when they begin: forks of one that has imported it, which takes longer
than all else that a small engine does."""

from __future__ import annotations

import atexit
import faulthandler
import functools
import gc
import importlib
import multiprocessing
import multiprocessing.util
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any
from unittest import mock

context = multiprocessing.get_context("forkserver")

_IMPORTED = (
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.llm",
    "vllm.model_executor.layers.quantization.compressed_tensors.utils",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.llama",
    "vllm.triton_utils.dispatcher",
    "vllm.v1.core.sched.async_scheduler",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm_relay.attention_backends.cpu.relay",
    "vllm_relay.long_context.scheduling.scheduler",
    "vllm_relay.metrics",
    "vllm_relay.modules.engine.worker",
    "vllm_relay.scheduler",
)


def fork_server() -> None:
    """Forks the process that all others are forks of: what this one has imported for its tests is
    imported once, and is not looked through for garbage, then or when they end.

    To be called before anything is computed: OpenMP's threads are not there after a fork.
    """
    for module in _IMPORTED:
        importlib.import_module(module)
    # vLLM looks at a model it does not know in a process of its own, which imports everything anew
    registry = importlib.import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda look: look()
    gc.freeze()
    # forks leave vLLM's shared memory to the tracker
    with mock.patch.dict(os.environ, PYTHONWARNINGS="ignore:resource_tracker:UserWarning"):
        resource_tracker.ensure_running()
    # those of OpenMP bear the process's name, others that fork well names of their own
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    assert names.count(Path("/proc/self/comm").read_text()) == len(sys._current_frames()), (
        "a module of tests computes in parallel when it is imported: to be done in its tests"
    )
    multiprocessing.util.spawnv_passfds = _fork_instead
    try:
        forkserver.ensure_running()
    finally:
        multiprocessing.util.spawnv_passfds = _spawnv_passfds


_spawnv_passfds = multiprocessing.util.spawnv_passfds


def _fork_instead(path: bytes, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """In the place of `spawnv_passfds`, for a fork server; returns the process's number."""
    process = os.fork()
    if process:
        return process
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.platforms import current_platform

    multiprocessing.util.spawnv_passfds = _spawnv_passfds
    forkserver._forkserver._lock = threading.Lock()  # held during the fork
    faulthandler.disable()
    # what pytest has open leads nowhere; the numbers stay taken, for what closes them one day
    nowhere = os.open(os.devnull, os.O_RDWR)
    kept = {0, 1, 2, nowhere, resource_tracker.getfd(), *descriptors}
    for number in {int(name) for name in os.listdir("/proc/self/fd")} - kept:
        os.dup2(nowhere, number, inheritable=False)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, closefd=False) for number in (1, 2))
    gc.unfreeze = gc.disable  # vLLM does it at its end, and looks through all that was imported
    with warnings.catch_warnings(action="ignore"):  # once for all: it looks through all modules
        current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = lambda self: None
    # who waits for a step leaves the core to others
    shm_broadcast.sched_yield = functools.partial(time.sleep, 0.001)
    try:
        forkserver.main(*descriptors, [])
    except BaseException as error:  # SystemExit, when nobody is left who could ask
        if not isinstance(error, SystemExit):
            traceback.print_exc()
    os._exit(0)


def start(
    target: Callable[..., None],
    *arguments: Any,
    stdout: Path,
    stderr: Path,
    environment: Mapping[str, str],
    spawns: bool = False,
) -> BaseProcess:
    """Calls `target(*arguments)`, which can be pickled, in a new process.

    Args:
        environment: beside what this process has, and TORCHDYNAMO_DISABLE=1: vLLM compiles a bit
            of its sampler even in eager mode. What other modules read when they are imported is
            read before it is set.
        spawns: vLLM's own processes begin with nothing, as they do for users, and what they are
            sent is pickled. Else they are forks of the new one.
    """
    for path in (stdout, stderr):
        path.touch()
    changed = {**os.environ, "TORCHDYNAMO_DISABLE": "1", **environment}
    given = (target, arguments, stdout, stderr, changed, spawns)
    process = context.Process(target=_run, args=given)
    process.start()
    return process


def run_module(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    timeout_s: float = 900,
    *,
    spawns: bool = False,
) -> subprocess.CompletedProcess[str]:
    """As `python -m module arguments...`; `spawns` as in `start`."""
    argv = [module, *arguments]
    with tempfile.TemporaryDirectory() as folder:
        stdout, stderr = Path(folder, "stdout"), Path(folder, "stderr")
        process = start(
            run_main, *argv, stdout=stdout, stderr=stderr, environment=environment, spawns=spawns
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
    run_main_in_session(module, str(inherited.fileno()))


def _run(
    target: Callable[..., None],
    arguments: Sequence[Any],
    stdout: Path,
    stderr: Path,
    environment: Mapping[str, str],
    spawns: bool,
) -> None:
    for path, descriptor in ((stdout, 1), (stderr, 2)):
        with path.open("ab") as file:
            os.dup2(file.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    import torch  # not before the environment is there

    torch._dynamo.config.disable = environment["TORCHDYNAMO_DISABLE"] == "1"
    # else it compiles a program for each set of instructions that the processor has, to see that
    # it runs
    torch._inductor.config.cpp.vec_isa_ok = True
    if not spawns:
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


def run_main_in_session(module: str, *arguments: str) -> None:
    """As `run_main`, in a session of its own: all processes below it get a signal at once, as from
    a terminal."""
    os.setsid()
    run_main(module, *arguments)
