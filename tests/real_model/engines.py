# SPDX-License-Identifier: Apache-2.0
"""Starts what is compared with the real model, each in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.vllm_processes import run_module

STOCK = {"attention_backend": "cpu_attn"}
RELAY = {"attention_backend": "relay", "additional_config": {"relay": {"scheduler": True}}}
WINDOW = {
    "min_context_tokens": 96,
    "sink_tokens": 32,
    "window_tokens": 64,
    "alpha": 0.0,  # everything is read
    "host_memory_gib": 1.0,
}
RELAY_SPARSE = {"attention_backend": "relay_sparse", "additional_config": {"relay": WINDOW}}


def relay_with(**options: Any) -> dict[str, Any]:
    """RELAY with other options of relay."""
    return {**RELAY, "additional_config": {"relay": {"scheduler": True, **options}}}


def sparse_with(**options: Any) -> dict[str, Any]:
    """RELAY_SPARSE with other options of relay."""
    return {**RELAY_SPARSE, "additional_config": {"relay": {**WINDOW, **options}}}


def run_engine(
    model: Path, folder: Path, engine_args: dict[str, Any], *scenarios: str
) -> dict[str, Any]:
    """What the scenarios of engine_main.py found."""
    args_path, output = folder / "engine_args.json", folder / "found.json"
    args_path.write_text(json.dumps(engine_args))
    run_main("engine_main", str(model), str(args_path), str(output), *scenarios)
    return json.loads(output.read_text())


def run_main(module: str, *arguments: str) -> None:
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = run_module(f"tests.real_model.{module}", arguments, environment, timeout_s=900)
    assert done.returncode == 0, done.stderr[-4000:]
