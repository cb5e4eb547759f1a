# SPDX-License-Identifier: Apache-2.0
"""The threads that build indexes beside the steps of the engine."""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor, thread
from typing import Any

import psutil

logger = logging.getLogger("vllm.relay")

_BUILDER_NICENESS = 10


def start_builders(threads: int) -> ThreadPoolExecutor:
    """Each builds the indexes of one context at a time; others wait."""
    return ThreadPoolExecutor(threads, "relay-index", initializer=_be_nice)


def process_ends() -> bool:
    """Python waits for the threads of all executors when it ends, whatever they still have to do:
    builders ask, and stop."""
    state: Any = thread
    return bool(getattr(state, "_shutdown", False))


def _be_nice() -> None:
    """Builders leave the cores to the steps of the engine, and use all of them: vLLM binds the
    thread that starts them to one core. On Linux, threads have priorities and cores of their own.
    """
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BUILDER_NICENESS)
        threads = psutil.Process().threads()
        cores = set().union(*(os.sched_getaffinity(thread.id) for thread in threads))
        os.sched_setaffinity(0, cores)
    except (OSError, psutil.Error):
        logger.debug("index builders run at normal priority", exc_info=True)
