# SPDX-License-Identifier: Apache-2.0
"""Whole engines with a Llama-3-8B's geometry and random weights, stock against relay: a hook that
does something only where vLLM and vllm-relay are installed, and enough time is left."""

import importlib.util
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.cuda.run import Run
from benchmarks.cuda.variants import Variant
from benchmarks.support.result import Goal

NEEDED_S = 240.0
STOCK, RELAY = "FLASH_ATTN", "RELAY"


@dataclass(frozen=True)
class Workload:
    name: str
    requests: int
    prefix_tokens: int
    own_tokens: int
    output_tokens: int
    bar: float
    """Least speed-up of relay over stock."""


WORKLOADS = [
    Workload("batch 128, prefix 8192", 128, 8192, 64, 128, 3.0),
    Workload("nothing shared", 128, 0, 1024, 128, 0.98),
    Workload("batch 64, prefix 32768", 64, 32768, 64, 128, 3.0),
    Workload("16 prompts of 4096 tokens, 16 samples each", 256, 4096, 1, 128, 2.0),
]


def variants(run: Run) -> list[Variant]:
    return []


def measure(run: Run) -> None:
    if run.size == "tiny" or importlib.util.find_spec("vllm") is None:
        run.result.leave_out("vLLM not found" if run.size != "tiny" else "no GPU to start vLLM on")
        return
    if run.clock.total_left_s < NEEDED_S:
        run.result.leave_out(
            f"{run.clock.total_left_s:.0f} s are left, {NEEDED_S:.0f} s are needed: run "
            f"--only engine --total-s {2 * NEEDED_S:.0f}"
        )
        return
    run.drop_pool()
    left_s = run.clock.total_left_s
    rates = {
        STOCK: _tokens_per_s(run, STOCK, left_s / 2),
        RELAY: _tokens_per_s(run, RELAY, left_s / 2),
    }
    rows = []
    for workload in WORKLOADS:
        stock, relay = (rates[backend].get(workload.name) for backend in (STOCK, RELAY))
        speedup = relay / stock if relay and stock else float("nan")
        rows.append(
            {
                "workload": workload.name,
                f"{STOCK} tokens/s": stock,
                f"{RELAY} tokens/s": relay,
                "speed-up": speedup,
            }
        )
        run.result.add_goal(Goal(f"engine, {workload.name}, tokens/s", speedup, workload.bar))
    run.result.add_table("Output tokens per second, Llama-3-8B, random weights", rows)


def _tokens_per_s(run: Run, backend: str, timeout_s: float) -> dict[str, float]:
    """By workload, as far as the engine came."""
    with tempfile.TemporaryDirectory(prefix="relay-bench-") as folder:
        order = {
            "folder": folder,
            "backend": backend,
            "workloads": [asdict(workload) for workload in WORKLOADS],
        }
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "benchmarks.cuda.engine_main", json.dumps(order)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
            if done.returncode:
                run.result.leave_out(f"{backend}: {done.stderr[-1000:]}")
        except subprocess.TimeoutExpired:
            run.result.leave_out(f"{backend}: out of time")
        return json.loads(result.read_text()) if result.exists() else {}
