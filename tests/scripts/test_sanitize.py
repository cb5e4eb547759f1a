# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.soak
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_the_workload_is_clean(sanitizers: str) -> None:
    if not (ROOT / "build" / "compile_commands.json").exists():
        pytest.skip("the extension was not built here")
    command = [sys.executable, "scripts/sanitize.py", sanitizers, "--cases", "20"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() == f"{sanitizers}: 20 cases"
