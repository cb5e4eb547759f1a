# SPDX-License-Identifier: Apache-2.0
"""What a statement takes for each of its rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BUCKET_ROWS = 2500
FEW_ROWS = 2 * BUCKET_ROWS
MOST_BYTES_PER_ROW = 2800
"""Of about 300 characters."""


def measured(folder: Path, num_rows: int, bucket_rows: int) -> dict[str, Any]:
    folder.mkdir()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.tables.jobs.memory_main"),
            *(str(num_rows), str(bucket_rows), str(folder)),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found["num_prompts"] == found["num_known"] == num_rows
    assert found["num_answers"] == [num_rows]
    print(f"{num_rows} rows, buckets of {bucket_rows}: {found['peak_bytes'] / 1e6:.0f} MB")
    return found


@pytest.mark.parametrize(
    "num_rows", [30_000, pytest.param(300_000, marks=pytest.mark.soak)], ids=str
)
def test_rows_are_held_in_little_memory(tmp_path: Path, num_rows: int) -> None:
    few = measured(tmp_path / "few", FEW_ROWS, BUCKET_ROWS)
    many = measured(tmp_path / "many", num_rows, BUCKET_ROWS)
    limit = few["peak_bytes"] + MOST_BYTES_PER_ROW * (num_rows - FEW_ROWS)
    assert many["peak_bytes"] < limit
