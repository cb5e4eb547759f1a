# SPDX-License-Identifier: Apache-2.0
"""Random arrivals, aborts, pins and unpins: run with `-m soak`, RELAY_SOAK_S seconds long."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.runs import ROOT
from tests.integration.tiny_models import save_model
from tests.scheduler.soak import FIRST_SEED, SECONDS

pytestmark = pytest.mark.soak


def run(*arguments: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.scheduler.soak_main", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        timeout=SECONDS + 300,
    )
    assert result.returncode == 0, result.stderr[-4000:]


def test_nothing_is_lost_and_nothing_leaks(tmp_path: Path) -> None:
    model = str(save_model("llama", tmp_path / "model"))
    expected, counts_path = tmp_path / "expected.json", tmp_path / "counts.json"
    run(model, str(expected))
    run(model, str(counts_path), str(SECONDS), str(FIRST_SEED), str(expected))
    counts = json.loads(counts_path.read_text())
    print(counts)
    assert all(count > 0 for name, count in counts.items() if name != "refused"), counts
