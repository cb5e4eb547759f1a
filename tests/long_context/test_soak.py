# SPDX-License-Identifier: Apache-2.0
"""Random requests about long contexts, on several engines, one after the other, over one folder.

Run with `-m soak`, RELAY_SOAK_S seconds long; RELAY_SOAK_S=1800 is the full run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.integration.runs import ROOT
from tests.long_context.soak import FIRST_SEED, SECONDS
from vllm_relay.demo.recall_model import build_recall_model

pytestmark = pytest.mark.soak

SECONDS_PER_ENGINE = 180.0
NUM_ENGINES = max(2, round(SECONDS / SECONDS_PER_ENGINE))
MAX_ENGINES = 4 * NUM_ENGINES
MAY_BE_NONE = {"wrong", "lost", "contexts_lost", "memory_taken", "refused"}
LEAST = max(1, SECONDS // 300)


def too_few(counts: Counter[str]) -> dict[str, int]:
    """What did not happen often enough."""
    return {name: counts[name] for name in counts.keys() - MAY_BE_NONE if counts[name] < LEAST}


def run(*arguments: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.long_context.soak_main", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        timeout=SECONDS / NUM_ENGINES + 400,
    )
    assert result.returncode == 0, result.stderr[-6000:]


def test_nothing_is_lost_nothing_is_wrong_and_nothing_leaks(tmp_path: Path) -> None:
    model = str(build_recall_model(tmp_path / "model", max_position_embeddings=2048))
    output = tmp_path / "output.json"
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    # on a slow machine an engine does less in its time
    for seed in range(FIRST_SEED, FIRST_SEED + MAX_ENGINES):
        if seed >= FIRST_SEED + NUM_ENGINES and not too_few(counts):
            break
        run(model, str(tmp_path / "contexts"), str(output), str(SECONDS / NUM_ENGINES), str(seed))
        result = json.loads(output.read_text())
        print(f"seed {seed}: {result['counts']}", flush=True)
        counts.update(result["counts"])
        wrong += result["wrong"]
    print(f"in all: {dict(counts)}")
    assert not wrong, "\n".join(wrong[:20])
    assert counts["lost"] == 0
    assert not too_few(counts), f"expected at least {LEAST} of each"
