# SPDX-License-Identifier: Apache-2.0
"""A job on actors whose driver is to be killed.

Usage: python -m tests.tables.engines.ray_actors.driver_main FOLDER CHECKPOINT
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from tests.tables.engines.ray_actors.fake_replica import ROWS, open_logged
from vllm_relay.tables import llm_map
from vllm_relay.tables.engines.ray_actors.starting import start_actors


def main(folder: str, checkpoint: str) -> None:
    engine = start_actors(partial(open_logged, Path(folder), step_s=0.1, max_running=4), 2)
    llm_map(ROWS, "Which {text}?", engine=engine, checkpoint=checkpoint, show_progress=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
