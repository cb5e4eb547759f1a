# SPDX-License-Identifier: Apache-2.0
"""Benchmarks are where the list, the results and the documentation say."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.report import load_results, write_page
from benchmarks.run_all import JSON_FOLDER, MODULES, PAGE, ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]


def test_every_benchmark_is_run() -> None:
    files = (ROOT / "benchmarks").rglob("bench_*.py")
    modules = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    assert sorted(modules) == sorted(MODULES.values())


@pytest.mark.parametrize("path", sorted(JSON_FOLDER.glob("bench_*.json")), ids=lambda p: p.stem)
def test_commands_of_results_can_be_given_today(path: Path) -> None:
    result = json.loads(path.read_text())
    assert path.stem.startswith(result["name"])
    assert shlex.split(result["command"])[:3] == ["python", "-m", MODULES[result["name"]]]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_pages_name_what_there_is(page: Path) -> None:
    text = page.read_text()
    for module in re.findall(r"python -m (benchmarks[\w.]*)", text):
        assert find_spec(module), module
    for path in re.findall(r"(?<![\w/(])benchmarks/[\w/]+\.(?:py|cpp)\b", text):
        assert (ROOT / path).exists(), path


def test_the_page_is_that_of_the_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / JSON_FOLDER.name
    shutil.copytree(JSON_FOLDER, folder)
    write_page(load_results(folder, MODULES), tmp_path / PAGE.name, folder)
    assert (tmp_path / PAGE.name).read_text() == PAGE.read_text()
