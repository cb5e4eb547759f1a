# SPDX-License-Identifier: Apache-2.0
"""Modular prompts on model runner V2, and with the kernels for GPUs, beside Hugging Face."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.tiny_models import MAX_MODEL_LEN_TOKENS, save_model

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]


def run(runner: str, backend: str, main: str, kind: str, folder: Path, *options: str) -> Any:
    """What a main writes, in a process from the beginning: vLLM looks for Triton when it is
    imported."""
    from vllm_relay.demo.tokenizer import build_tokenizer

    model = save_model(kind, folder / "model")
    build_tokenizer(MAX_MODEL_LEN_TOKENS).save_pretrained(model)
    output = folder / "seen.json"
    module = "tests.modules.variant_main"
    done = subprocess.run(
        [sys.executable, "-m", module, runner, backend, main, str(model), *options, str(output)],
        cwd=ROOT,
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(output.read_text())


@pytest.mark.parametrize(
    ("runner", "backend", "kind", "mode"),
    [
        ("v2", "cpu", "llama", "modular"),
        pytest.param("v2", "cpu", "qwen3", "repair", marks=pytest.mark.soak),
        pytest.param("v1", "cuda", "llama", "repair", marks=pytest.mark.soak),
        pytest.param("v2", "cuda", "qwen3", "modular", marks=pytest.mark.soak),
    ],
)
def test_logits_are_those_of_hugging_face(
    tmp_path: Path, runner: str, backend: str, kind: str, mode: str
) -> None:
    """Of the tokens behind prompts with modules, and behind plain ones in the same steps."""
    seen = run(runner, backend, "logits_main", kind, tmp_path, mode, "2")
    assert seen["runner_is_v2"] == (runner == "v2")
    assert seen["prompts"] == 10 and seen["segments"] > 10
    assert seen["worst"] < 1e-4
    assert seen["cached"] == seen["stored"]


@pytest.mark.soak
def test_requests_that_are_preempted_on_v2(tmp_path: Path) -> None:
    seen = run("v2", "cpu", "engine_main", "llama", tmp_path)
    assert seen["at_once"] == [seen["alone"]] * len(seen["at_once"])
    assert seen["plain_after"] == seen["plain_before"] != seen["alone"]
    assert seen["preemptions"] > 0
    assert seen["together"] == seen["one_by_one"]
    assert seen["repaired"][0] == seen["repaired"][1]
    assert seen["after_reset"] == seen["at_last"] == seen["alone"]
    assert seen["exact"] == seen["written_out"]
