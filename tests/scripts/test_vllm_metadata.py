# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import zipfile
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "vllm_metadata.py"


def test_wheel_installs_as_metadata_without_requirements_or_commands(tmp_path: Path) -> None:
    made = subprocess.run(
        [sys.executable, str(SCRIPT), "0.32.0+cpu", str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    wheel = Path(made.stdout.strip())
    assert wheel.name == "vllm-0.32.0+cpu-py3-none-any.whl"

    target = tmp_path / "site-packages"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(target), str(wheel)], check=True, capture_output=True)
    (found,) = importlib.metadata.distributions(path=[str(target)])
    assert (found.metadata["Name"], found.version) == ("vllm", "0.32.0+cpu")
    assert found.requires is None
    assert not found.entry_points
    assert [path.name for path in target.iterdir()] == ["vllm-0.32.0+cpu.dist-info"]


def test_every_file_of_the_wheel_is_recorded(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, str(SCRIPT), "1.0", str(tmp_path)], check=True, capture_output=True
    )
    with zipfile.ZipFile(tmp_path / "vllm-1.0-py3-none-any.whl") as wheel:
        recorded = wheel.read("vllm-1.0.dist-info/RECORD").decode().split()
        assert [line.split(",")[0] for line in recorded] == wheel.namelist()
