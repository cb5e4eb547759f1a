# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.cuda.parts import NAMES

ROOT = Path(__file__).resolve().parents[3]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.cuda", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def unified_attention() -> list[str]:
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return []
    folder = Path(spec.submodule_search_locations[0])
    path = folder / "v1" / "attention" / "ops" / "triton_unified_attention.py"
    return ["--unified-attention", str(path)]


@pytest.mark.soak
def test_all_parts_run_without_a_gpu_and_report_no_times(tmp_path: Path) -> None:
    files = ["--json", str(tmp_path / "a.json"), "--markdown", str(tmp_path / "a.md")]
    done = run("--interpret", *files, *unified_attention())
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads((tmp_path / "a.json").read_text())
    assert result["measured"] is False
    assert list(result["parts"]) == list(NAMES)
    assert {part["status"] for part in result["parts"].values()} == {"done"}
    rows = [
        row
        for part in result["parts"].values()
        for table in part["tables"]
        for row in table["rows"]
    ]
    times = [value for row in rows for name, value in row.items() if name.endswith(" us")]
    assert len(times) > 20
    assert set(times) == {"not measured"}
    assert all(goal["met"] is None for part in result["parts"].values() for goal in part["goals"])
    assert result["rivals"]["SDPA, contiguous"] == "found"
    if unified_attention():
        assert result["rivals"]["vLLM Triton"] == "found"
    markdown = (tmp_path / "a.md").read_text()
    assert "nothing was timed" in markdown
    assert "WRONG" not in markdown


def test_an_unknown_part_is_refused() -> None:
    done = run("--only", "grid,nonsense")
    assert done.returncode == 2
    assert "unknown parts nonsense: known are correct, " in done.stderr


def test_without_a_gpu_it_says_what_to_add(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = run("--json", str(tmp_path / "a.json"))
    assert done.returncode == 2
    assert "--interpret" in done.stderr
