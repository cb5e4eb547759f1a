# SPDX-License-Identifier: Apache-2.0
"""Two real engines that Ray runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.tiny_models import save_model
from tests.support.one_ray import one_ray
from tests.tables.byte_tokenizer import byte_tokenizer

pytestmark = pytest.mark.integration


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = save_model("llama", tmp_path / "model")
    byte_tokenizer().save_pretrained(path)
    return path


def test_two_vllms_answer_as_one_does(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    # a process whose surroundings know of no Ray of other tests
    environment = {name: value for name, value in os.environ.items() if "RAY" not in name}
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1"}
    main = [sys.executable, "-m", "tests.tables.engines.ray_actors.vllm_main"]
    with one_ray():
        done = subprocess.run(
            [*main, str(model), str(tmp_path)], env=environment, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["identity"] == found["identity_of_one"]
    several, one = found["several"], found["one"]
    assert several["texts"] == one["texts"] and len(set(one["texts"])) > 1
    assert several["chosen"] == one["chosen"]
    assert several["prompt_tokens"] == one["prompt_tokens"]
    assert several["cached_tokens"] > 0
    assert not found["is_ray_left"]
