# SPDX-License-Identifier: Apache-2.0
"""Modular prompts in a real vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.tiny_models import MAX_MODEL_LEN_TOKENS, save_model
from tests.prefix_cache.modules.engine_main import NUM_AT_ONCE
from tests.vllm_processes import run_module

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from vllm_relay.demo.tokenizer import build_tokenizer

    found = {}
    for kind in ("llama", "qwen3"):
        found[kind] = save_model(kind, tmp_path_factory.mktemp(kind))
        build_tokenizer(MAX_MODEL_LEN_TOKENS).save_pretrained(found[kind])
    return found


def run(main: str, *arguments: str, output: Path, multiprocessing: bool = False) -> dict[str, Any]:
    done = run_module(
        f"tests.prefix_cache.modules.{main}",
        [*arguments, str(output)],
        {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(multiprocessing))},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(output.read_text())


@pytest.mark.parametrize(("kind", "mode"), [("llama", "modular"), ("qwen3", "repair")])
def test_logits_are_those_of_hugging_face(
    models: dict[str, Path], tmp_path: Path, kind: str, mode: str
) -> None:
    """With the same positions and a mask that shows each token what it may see."""
    seen = run("logits_main", str(models[kind]), mode, "10", output=tmp_path / "seen.json")
    assert seen["prompts"] == 50 and seen["segments"] > 100
    assert seen["worst"] < 1e-4
    assert seen["cached"] == seen["stored"]


@pytest.mark.parametrize("multiprocessing", [False, True], ids=["in_process", "spawned"])
def test_requests_with_modules(
    models: dict[str, Path], tmp_path: Path, multiprocessing: bool
) -> None:
    seen = run(
        "engine_main",
        str(models["llama"]),
        output=tmp_path / "seen.json",
        multiprocessing=multiprocessing,
    )
    # five segments: what every prompt has, two modules, and one in each
    assert seen["encodings_at_once"] == 5
    assert seen["hits_at_once"] == 5 * NUM_AT_ONCE
    assert seen["encoded_bytes"] == 7 * 32 * 2 * 2 * 2 * 32 * 4
    assert seen["at_once"] == [seen["alone"]] * NUM_AT_ONCE
    assert seen["cached"][0] == seen["cached"][1] == 7 * 32
    # nothing of a module lies where a prompt without modules would find it
    assert seen["plain_after"] == seen["plain_before"] != seen["alone"]
    assert seen["plain_cached"] == 0
    assert seen["together"] == seen["one_by_one"]
    assert seen["preemptions"] > 0 and seen["evicted"] > 30
    assert seen["repaired"][0] == seen["repaired"][1]
    assert seen["reset"]
    assert seen["after_reset"] == seen["at_last"] == seen["alone"]
    assert seen["exact"] == seen["written_out"]
    for error, expected in zip(
        seen["errors"],
        ["prompt_logprobs", "blocks of 64 tokens", "no tail", "relay_modules", "max_tokens is 500",
         "a plan for"],
        strict=True,
    ):  # fmt: skip
        assert expected in error
