# SPDX-License-Identifier: Apache-2.0
"""Modular prompts for a long time; RELAY_SOAK_S seconds long."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.integration.tiny_models import MAX_MODEL_LEN_TOKENS, save_model
from tests.support.vllm_processes import run_module

pytestmark = [pytest.mark.integration, pytest.mark.soak]


def test_schemas_come_and_go_under_load(tmp_path: Path) -> None:
    from vllm_relay.demo.tokenizer import build_tokenizer

    model = save_model("llama", tmp_path / "model")
    build_tokenizer(MAX_MODEL_LEN_TOKENS).save_pretrained(model)
    seconds = os.environ.get("RELAY_SOAK_S", "60")
    output = tmp_path / "counts.json"
    done = run_module(
        "tests.modules.soak_main",
        [str(model), seconds, "0", str(output)],
        {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"},
        timeout_s=float(seconds) + 600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    counts = json.loads(output.read_text())
    print(counts)
    for name in ("wrong", "lost", "leaked blocks", "records left"):
        assert counts[name] == 0, counts
    for name in ("checked", "answered", "aborted", "num_preemptions", "schemas removed"):
        assert counts[name] > 0, counts
