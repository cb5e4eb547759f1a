# SPDX-License-Identifier: Apache-2.0
"""Runs of engine_main.py and features_main.py, and what must be equal between two of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.vllm_processes import run_module

ROOT = Path(__file__).parents[2]
needs_two_cores = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="vLLM gives each of two ranks a core of its own"
)

ROBUST_LEAD = 1e-3  # nats; below it rounding may decide which token is best

Run = Callable[..., dict[str, Any]]


def start(
    directory: Path,
    engine_args: dict[str, Any],
    scenarios: tuple[str, ...] = (),
    multiprocessing: bool = False,
    driver: str = "engine_main",
    spawns: bool = False,
) -> subprocess.CompletedProcess[str]:
    args_path = directory / "engine_args.json"
    args_path.write_text(json.dumps(engine_args))
    return run_module(
        f"tests.integration.{driver}",
        [str(directory / "output.json"), str(args_path), *scenarios],
        {
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(multiprocessing)),
            "TORCHDYNAMO_DISABLE": str(int(engine_args.get("enforce_eager", True))),
        },
        spawns=spawns,
    )


def run_v2(
    driver: str, engine_args: dict[str, Any], scenarios: tuple[str, ...], folder: Path
) -> dict[str, Any]:
    """What a driver finds with model runner V2, in a process from the beginning: vLLM looks for
    Triton when it is imported."""
    arguments, output = folder / "arguments.json", folder / "output.json"
    arguments.write_text(json.dumps(engine_args))
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1"}
    module = [sys.executable, "-m", "tests.integration.v2_main", driver]
    done = subprocess.run(
        [*module, str(output), str(arguments), *scenarios],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(output.read_text())


def assert_same_completions(
    actual: Any, expected: Any, robust_lead: float = ROBUST_LEAD, least_compared: float = 0.8
) -> None:
    """Equal tokens, up to the first position where the best two tokens are too close."""
    if isinstance(expected, dict) and "token_ids" not in expected:
        assert actual.keys() == expected.keys()
        actual, expected = list(actual.values()), list(expected.values())
    assert len(actual) == len(expected)
    compared = 0
    for ours, theirs in zip(actual, expected, strict=True):
        end = num_comparable(theirs, robust_lead)
        assert ours["token_ids"][:end] == theirs["token_ids"][:end]
        compared += end
    total = sum(len(theirs["token_ids"]) for theirs in expected)
    assert compared >= least_compared * total, (
        f"only {compared} of {total} tokens were far enough apart"
    )


def num_comparable(expected: dict[str, Any], robust_lead: float = ROBUST_LEAD) -> int:
    """How many of its tokens come before the first one that rounding may decide."""
    close = (position for position, lead in enumerate(expected["leads"]) if lead < robust_lead)
    return next(close, len(expected["token_ids"]))
