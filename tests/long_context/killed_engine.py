# SPDX-License-Identifier: Apache-2.0
"""The process of an engine that is killed.

It asks about every context that is in its folder and goes on with random requests: for so many
seconds, after which it checks that nothing is left, or until it is killed. Each thing that happens
to a context is a line of its journal, and so is "ready", "asked" when the contexts of earlier
engines have been asked about, "counts" at the end, and "failed".
"""

from __future__ import annotations

import json
import os
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.long_context.soak import Soak, start_engine


@dataclass(frozen=True)
class Order:
    """What an engine is to do.

    Attributes:
        stored: ids of the contexts that it must find.
        seconds: None until it is killed.
    """

    model: Path
    folder: Path
    journal: Path
    seed: int
    stored: list[str]
    seconds: float | None


class Journal:
    """Lines that are in the file when `write` has returned, whatever happens to the process."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, kind: str, value: Any = None) -> None:
        os.write(self._descriptor, (json.dumps([kind, value]) + "\n").encode())


def serve(order: Order) -> None:
    journal = Journal(order.journal)
    try:
        _serve(order, journal)
    except BaseException:
        journal.write("failed", traceback.format_exc())
        raise


def _serve(order: Order, journal: Journal) -> None:
    engine = start_engine(str(order.model), order.folder)
    run = Soak(engine, order.folder, order.seed, on_event=journal.write)
    journal.write("ready")
    journal.write("asked", run.ask_about_contexts(order.stored))
    end_s = None if order.seconds is None else time.monotonic() + order.seconds

    def goes_on() -> bool:
        assert not run.wrong, run.wrong
        return end_s is None or time.monotonic() < end_s

    run.run_while(goes_on)
    run.check_nothing_is_left()
    journal.write("counts", run.counts)
