# SPDX-License-Identifier: Apache-2.0
"""A job holds one bucket of rows at a time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BUCKET_ROWS = 5000
LIMIT_MB = 140
"""More than few rows take: what DuckDB may use, and blocks that were freed. All rows in one bucket
take more than that."""


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
    "num_rows", [60_000, pytest.param(300_000, marks=pytest.mark.soak)], ids=str
)
def test_more_rows_take_no_more_memory(tmp_path: Path, num_rows: int) -> None:
    few = measured(tmp_path / "few", 2 * BUCKET_ROWS, BUCKET_ROWS)
    many = measured(tmp_path / "many", num_rows, BUCKET_ROWS)
    assert many["peak_bytes"] < few["peak_bytes"] + LIMIT_MB * 1_000_000
