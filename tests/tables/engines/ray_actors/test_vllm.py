# SPDX-License-Identifier: Apache-2.0
"""Two real engines that Ray runs."""

from __future__ import annotations

import json
import os
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


def answers(model: Path, output: Path, replicas: int) -> Any:
    """In a process of its own."""
    done = run_module(
        "tests.tables.engines.ray_actors.vllm_main",
        [str(model), str(output), str(replicas)],
        {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(output.read_text())


def test_two_vllms_answer_as_one_does(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    # what surrounds the process knows of no Ray of other tests
    for name in [name for name in os.environ if "RAY" in name]:
        monkeypatch.delenv(name)
    with one_ray():
        several = answers(model, tmp_path / "several.json", 2)
    one = answers(model, tmp_path / "one.json", 1)
    assert several["identity"] == one["identity"]
    assert several["texts"] == one["texts"] and len(set(one["texts"])) > 1
    assert several["chosen"] == one["chosen"]
    assert several["prompt_tokens"] == one["prompt_tokens"]
    assert several["cached_tokens"] > 0
    assert not several["is_ray_left"]
