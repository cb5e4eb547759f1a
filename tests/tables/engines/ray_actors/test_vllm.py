# SPDX-License-Identifier: Apache-2.0
"""Real engines in the place of actors, and two that Ray runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def check_same_answers(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["texts"] == expected["texts"] and len(set(expected["texts"])) > 1
    assert found["chosen"] == expected["chosen"]
    assert found["prompt_tokens"] == expected["prompt_tokens"]
    assert found["cached_tokens"] > 0


def test_a_replica_of_vllm_answers_as_its_engine_does(model: Path, tmp_path: Path) -> None:
    main = "tests.tables.engines.ray_actors.replica_main"
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = run_module(main, [str(model), str(tmp_path)], environment)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    check_same_answers(found["replica"], found["engine"])


# three processes that import vLLM
@pytest.mark.soak
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
    check_same_answers(found["several"], found["one"])
    assert not found["is_ray_left"]
