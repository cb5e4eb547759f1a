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

from benchmarks.questions import QUESTIONS
from benchmarks.report import load_results, write_pages
from benchmarks.run_all import JSON_FOLDER, MODULES, PAGE, ROOMS, ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]


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


def test_every_benchmark_answers_a_question() -> None:
    answering = [name for question in QUESTIONS for name in question.benchmarks]
    assert sorted(answering) == sorted(MODULES)
    plots = [plot for question in QUESTIONS for plot in question.plots]
    assert [plot for plot in plots if not (JSON_FOLDER / plot).exists()] == []


def test_every_result_is_shown_once() -> None:
    shown = [(result["name"], result["command"]) for result in load_results(JSON_FOLDER, MODULES)]
    paths = JSON_FOLDER.glob("bench_*.json")
    results = [json.loads(path.read_text()) for path in paths]
    assert sorted(shown) == sorted((result["name"], result["command"]) for result in results)


def test_the_pages_are_those_of_the_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / JSON_FOLDER.name
    shutil.copytree(JSON_FOLDER, folder)
    for page in folder.glob("*.md"):
        page.unlink()
    write_pages(load_results(folder, MODULES), tmp_path / PAGE.name, folder, ROOMS)
    assert (tmp_path / PAGE.name).read_text() == PAGE.read_text()
    written = {page.name: page.read_text() for page in folder.glob("*.md")}
    assert written == {page.name: page.read_text() for page in JSON_FOLDER.glob("*.md")}
