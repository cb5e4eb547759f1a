# SPDX-License-Identifier: Apache-2.0
"""Jobs on vLLM that are killed go on where they were."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.tiny_models import save_model
from tests.tables.byte_tokenizer import byte_tokenizer

pytestmark = [pytest.mark.integration, pytest.mark.soak]

NUM_ROWS = 800
NUM_KILLS = 3


def start(model: Path, folder: Path) -> subprocess.Popen[bytes]:
    files = [folder / "answers", folder / "tokens", folder / "result"]
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.tables.engines.killed_vllm_main", str(model)),
            *(*map(str, files), str(NUM_ROWS)),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def generated_tokens(folder: Path) -> int:
    log = folder / "tokens"
    return sum(map(int, log.read_text().split())) if log.exists() else 0


def finish(model: Path, folder: Path) -> list[list[object]]:
    process = start(model, folder)
    _, stderr = process.communicate()
    assert process.returncode == 0, stderr.decode()[-4000:]
    return json.loads((folder / "result").read_text())


def test_killed_jobs_generate_little_twice(tmp_path: Path) -> None:
    model = save_model("llama", tmp_path / "model")
    byte_tokenizer().save_pretrained(model)
    whole = tmp_path / "whole"
    whole.mkdir()
    expected = finish(model, whole)
    one_pass = generated_tokens(whole)
    killed = tmp_path / "killed"
    killed.mkdir()
    rng = random.Random(0)
    for kill in range(NUM_KILLS):
        goal = one_pass * (kill + rng.random()) / (NUM_KILLS + 1)
        process = start(model, killed)
        while process.poll() is None and generated_tokens(killed) <= goal:
            time.sleep(0.01)
        assert process.poll() is None
        process.kill()
        process.communicate()
    assert finish(model, killed) == expected
    ratio = generated_tokens(killed) / one_pass
    print(f"tokens generated, of one pass: {ratio:.4f}")
    assert 1 <= ratio <= 1.02
