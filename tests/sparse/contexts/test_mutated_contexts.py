# SPDX-License-Identifier: Apache-2.0
"""Changed contexts with right checksums: no crash, no hang, no other error than that of damage, no
answer that is not true of the keys.

Run with `-m soak`, RELAY_SOAK_MUTATIONS cases long, with the seed RELAY_SOAK_FIRST_SEED.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support.depth import cases
from tests.support.waiting import WAIT_S

PER_PROCESS = 5_000
SOAK_CASES = int(os.environ.get("RELAY_SOAK_MUTATIONS", "2000"))
SOAK_SEED = int(os.environ.get("RELAY_SOAK_FIRST_SEED", "1"))


def run(folder: Path, seed: int, count: int) -> Counter[str]:
    """In processes of their own: how many cases ended how."""
    outcomes: Counter[str] = Counter()
    for first in range(0, count, PER_PROCESS):
        end = min(first + PER_PROCESS, count)
        command = [sys.executable, "-X", "faulthandler", "-m", "tests.sparse.mutated_contexts"]
        done = subprocess.run(
            [*command, str(folder), *map(str, (seed, first, end))],
            capture_output=True, text=True, timeout=WAIT_S + (end - first) / 10,
        )  # fmt: skip
        tried = folder / "case"
        number = tried.read_text() if tried.exists() else "none"
        assert done.returncode == 0, f"case {number} of seed {seed}: {done.stderr[-3000:]}"
        outcomes += Counter(json.loads(done.stdout.splitlines()[-1]))
    return outcomes


def check(outcomes: Counter[str], count: int) -> None:
    assert outcomes.total() == count
    for outcome in ("accepted", "refused when opened", "refused when read"):
        assert outcomes[outcome] > count / 20, outcomes


def test_what_was_changed_is_refused_or_true(tmp_path: Path) -> None:
    count = cases(500)
    check(run(tmp_path, 0, count), count)


@pytest.mark.soak
def test_many_changes(tmp_path: Path) -> None:
    check(run(tmp_path, SOAK_SEED, SOAK_CASES), SOAK_CASES)
