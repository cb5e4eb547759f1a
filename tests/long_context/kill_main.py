# SPDX-License-Identifier: Apache-2.0
"""Engines that are killed: each is a fork of this process, which has imported vLLM.

Usage: python -m tests.long_context.kill_main MODEL FOLDER

Reads orders from its standard input, a line of JSON each: {"journal": PATH, "seed": N, "stored":
[ids], "seconds": S or null}. For each it forks, prints the id of the new process, and its wait
status when it has ended.

The new process starts an engine over the folder, asks about every context that is there and goes on
with random requests: for so many seconds, after which it checks that nothing is left, or until it
is killed. Each thing that happens to a context is a line of its journal, and so is "ready", "asked"
when the contexts of earlier engines have been asked about, "counts" at the end, and "failed".
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import vllm.model_executor.models.llama  # noqa: F401
import vllm.v1.engine.core  # noqa: F401
import vllm.v1.worker.cpu_worker  # noqa: F401

import vllm_relay.long_context.scheduler  # noqa: F401
from tests.long_context.soak import Soak, start_engine


class Journal:
    """Lines that are in the file when `write` has returned, whatever happens to the process."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, kind: str, value: Any = None) -> None:
        os.write(self._descriptor, (json.dumps([kind, value]) + "\n").encode())


def serve(model: str, folder: Path, order: dict[str, Any], journal: Journal) -> None:
    engine = start_engine(model, folder)
    run = Soak(engine, folder, order["seed"], on_event=journal.write)
    journal.write("ready")
    journal.write("asked", run.ask_about_contexts(order["stored"]))
    seconds = order["seconds"]
    end_s = None if seconds is None else time.monotonic() + seconds

    def goes_on() -> bool:
        assert not run.wrong, run.wrong
        return end_s is None or time.monotonic() < end_s

    run.run_while(goes_on)
    run.check_nothing_is_left()
    journal.write("counts", run.counts)


def run_in_fork(model: str, folder: Path, order: dict[str, Any]) -> int:
    """The id of the new process."""
    process_id = os.fork()
    if process_id:
        return process_id
    status = 1
    journal = Journal(order["journal"])
    try:
        serve(model, folder, order, journal)
        status = 0
    except BaseException:
        journal.write("failed", traceback.format_exc())
    finally:
        os._exit(status)


def main() -> None:
    model, folder = sys.argv[1:]
    for line in sys.stdin:
        process_id = run_in_fork(model, Path(folder), json.loads(line))
        print(process_id, flush=True)
        print(os.waitpid(process_id, 0)[1], flush=True)


if __name__ == "__main__":
    main()
