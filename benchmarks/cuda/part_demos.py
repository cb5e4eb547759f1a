# SPDX-License-Identifier: Apache-2.0
"""The demos, where vLLM is installed: they know the right answers, and fail on others."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.cuda import ROOT
from benchmarks.cuda.run import Run
from benchmarks.cuda.variants import Variant
from benchmarks.support.formatting import Row
from benchmarks.support.result import Goal

NEEDED_S = 120.0
"""Of each."""
DEMOS = {
    "one shared prompt": ["--model", "recall"],
    "prompt modules": ["--modules"],
    "a long document, RELAY_SPARSE": ["--long"],
}


def variants(run: Run) -> list[Variant]:
    return []


def measure(run: Run) -> None:
    rows: list[Row] = []
    for name, arguments in DEMOS.items():
        if not run.starts_engines("demos", NEEDED_S):
            break
        run.result.doing(name)
        rows.append({"demo": name, **_run(run, name, arguments)})
    if rows:
        _report(run, rows)


def _report(run: Run, rows: list[Row]) -> None:
    run.result.add_table("Demos", rows, "The exit status; 0: all answers are right.")
    wrong = sum(row["status"] != 0 for row in rows)
    run.result.add_goal(
        Goal(f"demos of {len(rows)} that failed", wrong, 0, 0, lower_is_better=True, unit="demos")
    )


def _run(run: Run, name: str, arguments: list[str]) -> Row:
    call = "from vllm_relay.cli import app; app()"
    with tempfile.TemporaryDirectory(prefix="relay-bench-") as folder:
        numbers = Path(folder) / "numbers.json"
        command = [sys.executable, "-c", call, "demo", *arguments, "--json", str(numbers)]
        try:
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=NEEDED_S
            )
        except subprocess.TimeoutExpired:
            run.result.add_finding(f"{name}: not done after {NEEDED_S:.0f} s")
            return {"status": None, "speed-up": None}
        print(done.stdout, done.stderr, flush=True)
        if done.returncode:
            run.result.add_finding(f"WRONG: {name}: {done.stdout[-300:]}{done.stderr[-300:]}")
        found = json.loads(numbers.read_text()) if numbers.exists() else {}
        return {"status": done.returncode, "speed-up": found.get("speedup")}
