# SPDX-License-Identifier: Apache-2.0
"""A job on actors whose driver is to be killed: they stand still after some steps.

Usage: python -m tests.tables.engines.ray_actors.driver_main FOLDER CHECKPOINT
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from tests.tables.engines.ray_actors.fake_replica import ROWS, WaitsFor, open_logged
from vllm_relay.tables import llm_map
from vllm_relay.tables.engines.ray_actors.starting import start_actors

HELD_STEP, MAX_RUNNING = 8, 4


def main(folder: str, checkpoint: str) -> None:
    held = WaitsFor(Path(folder), "go", step=HELD_STEP)
    options = {"max_running": MAX_RUNNING, "before_step": held}
    engine = start_actors(partial(open_logged, Path(folder), **options), 2)
    llm_map(ROWS, "Which {text}?", engine=engine, checkpoint=checkpoint, show_progress=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
