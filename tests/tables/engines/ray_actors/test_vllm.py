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
from tests.support.vllm_processes import run_module
from tests.tables.byte_tokenizer import byte_tokenizer

pytestmark = pytest.mark.integration


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = save_model("llama", tmp_path / "model")
    byte_tokenizer().save_pretrained(path)
    return path


def test_two_vllms_answer_as_one_does(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    options = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1"}
    # a process whose surroundings know of no Ray of other tests
    environment = {name: value for name, value in os.environ.items() if "RAY" not in name}
    main = "tests.tables.engines.ray_actors.vllm_main"
    outputs = [tmp_path / "several.json", tmp_path / "one.json"]
    with one_ray():
        command = [sys.executable, "-m", main, str(model), str(outputs[0]), "2"]
        done = subprocess.run(
            command, env={**environment, **options}, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr[-4000:]
    done = run_module(main, [str(model), str(outputs[1]), "1"], options)
    assert done.returncode == 0, done.stderr[-4000:]
    several, one = (json.loads(each.read_text()) for each in outputs)
    assert several["identity"] == one["identity"]
    assert several["texts"] == one["texts"] and len(set(one["texts"])) > 1
    assert several["chosen"] == one["chosen"]
    assert several["prompt_tokens"] == one["prompt_tokens"]
    assert several["cached_tokens"] > 0
    assert not several["is_ray_left"]
