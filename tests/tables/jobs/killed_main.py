# SPDX-License-Identifier: Apache-2.0
"""A job that is to be killed: on an engine that is slow, and writes down what it generates.

Usage: python -m tests.tables.jobs.killed_main CHECKPOINT TOKEN_LOG RESULT NUM_ROWS STEP_S
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.tables.fake_engine import FakeEngine
from tests.tables.jobs.job_cases import NUMBERS, NUMBERS_SQL, answered, numbers_table, runner

NUM_ANSWER_TOKENS = 6
MAX_RUNNING = 8


def main(checkpoint: str, token_log: str, result: str, num_rows: str, step_s: str) -> None:
    connection = numbers_table(int(num_rows))
    engine = FakeEngine(
        max_running=MAX_RUNNING,
        num_answer_tokens=NUM_ANSWER_TOKENS,
        step_s=float(step_s),
        token_log=Path(token_log),
    )
    runner(connection, engine, Path(checkpoint), bucket_rows=500).answer(
        NUMBERS_SQL, NUMBERS, "out"
    )
    Path(result).write_text(json.dumps(answered(connection)))


if __name__ == "__main__":
    main(*sys.argv[1:])
