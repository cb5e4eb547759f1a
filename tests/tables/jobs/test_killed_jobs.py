# SPDX-License-Identifier: Apache-2.0
"""Jobs that are killed at any moment go on where they were."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.tables.fake_engine import FakeEngine
from tests.tables.jobs.job_cases import NUMBERS, NUMBERS_SQL, answered, numbers_table, runner
from tests.tables.jobs.killed_main import NUM_ANSWER_TOKENS

STEP_S = 0.001


def start(folder: Path, num_rows: int, name: str = "") -> subprocess.Popen[bytes]:
    files = [str(folder / "answers"), str(folder / f"tokens{name}"), str(folder / f"result{name}")]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.tables.jobs.killed_main", *files, str(num_rows), str(STEP_S)],
        stderr=subprocess.PIPE,
    )


class TokenLogs:
    """Of the processes in a folder; reads what is new in them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read_bytes: Counter[Path] = Counter()
        self._num_tokens = 0

    def num_tokens(self) -> int:
        for log in self._folder.glob("tokens*"):
            with log.open("rb") as file:
                file.seek(self._read_bytes[log])
                lines = file.read().rpartition(b"\n")[0]
            self._read_bytes[log] += len(lines)
            self._num_tokens += sum(map(int, lines.split()))
        return self._num_tokens


def uninterrupted(num_rows: int) -> list[list[object]]:
    connection = numbers_table(num_rows)
    runner(connection, FakeEngine()).answer(NUMBERS_SQL, NUMBERS, "out")
    return [list(row) for row in answered(connection)]


def kill_while_it_generates(
    folder: Path, logs: TokenLogs, num_rows: int, rng: random.Random
) -> None:
    begin = logs.num_tokens()
    left = num_rows * NUM_ANSWER_TOKENS - begin
    # somewhere in what is left, at random
    goal = begin + rng.randrange(1, max(left // 2, 2))
    process = start(folder, num_rows)
    while process.poll() is None and logs.num_tokens() < goal:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()


@pytest.mark.parametrize(
    ("num_rows", "num_kills"), [(2000, 3), pytest.param(20_000, 20, marks=pytest.mark.soak)]
)
def test_killed_jobs_generate_little_twice(tmp_path: Path, num_rows: int, num_kills: int) -> None:
    rng = random.Random(num_rows)
    logs = TokenLogs(tmp_path)
    for _ in range(num_kills):
        kill_while_it_generates(tmp_path, logs, num_rows, rng)
    process = start(tmp_path, num_rows)
    _, stderr = process.communicate()
    assert process.returncode == 0, stderr.decode()
    assert json.loads((tmp_path / "result").read_text()) == uninterrupted(num_rows)
    ratio = logs.num_tokens() / (num_rows * NUM_ANSWER_TOKENS)
    print(f"tokens generated, of one pass: {ratio:.4f}")
    assert 1 <= ratio <= 1.02


def test_two_processes_may_use_one_checkpoint_at_once(tmp_path: Path) -> None:
    processes = [start(tmp_path, 400, name) for name in "ab"]
    for process in processes:
        _, stderr = process.communicate()
        assert process.returncode == 0, stderr.decode()
    for name in "ab":
        assert json.loads((tmp_path / f"result{name}").read_text()) == uninterrupted(400)
