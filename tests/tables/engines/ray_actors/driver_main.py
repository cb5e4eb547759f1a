# SPDX-License-Identifier: Apache-2.0
"""A job on actors whose driver is to be killed: they stand still when they have answered some.

Usage: python -m tests.tables.engines.ray_actors.driver_main FOLDER CHECKPOINT
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.support.waiting import wait_for
from tests.tables.engines.ray_actors.fake_replica import ROWS, open_logged
from tests.tables.fake_engine import Fields, echo
from vllm_relay.tables import llm_map
from vllm_relay.tables.engines.ray_actors.starting import start_actors

NUM_ANSWERS = 40


@dataclass
class FirstAnswers:
    """`NUM_ANSWERS` of a process."""

    num_asked: int = 0

    def __call__(self, fields: Fields) -> str:
        self.num_asked += 1
        if self.num_asked > NUM_ANSWERS:
            wait_for(lambda: False)
        return echo(fields)


def main(folder: str, checkpoint: str) -> None:
    opened = partial(open_logged, Path(folder), answer=FirstAnswers(), max_running=4)
    engine = start_actors(opened, 2)
    llm_map(ROWS, "Which {text}?", engine=engine, checkpoint=checkpoint, show_progress=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
