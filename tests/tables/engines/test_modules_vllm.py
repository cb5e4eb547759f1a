# SPDX-License-Identifier: Apache-2.0
"""Values that rows share are computed once by vLLM, and read in every row."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support import vllm_processes

pytestmark = pytest.mark.integration
MODULES = {"fields": 6 + 7, "sets": 6}
MODULES_PER_ROW = {"fields": 2, "sets": 3}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("modules")
    done = vllm_processes.run_module(
        "tests.tables.engines.modules_main",
        [str(folder)],
        {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "found.json").read_text())


def computed(seen: dict[str, Any]) -> int:
    return seen["report"]["prompt_tokens"] - seen["report"]["cached_tokens"]


@pytest.mark.parametrize("table", ["fields", "sets"])
@pytest.mark.parametrize("modules", ["off", "modular", "repair"])
def test_answers_are_right(found: dict[str, Any], table: str, modules: str) -> None:
    seen = found[table][modules]
    assert seen["errors"] == []
    assert seen["num_right"] == seen["num_rows"]


@pytest.mark.parametrize("table", ["fields", "sets"])
@pytest.mark.parametrize("modules", ["modular", "repair"])
def test_modules_are_computed_once(found: dict[str, Any], table: str, modules: str) -> None:
    seen = found[table][modules]
    # with what all prompts begin with
    assert seen["encodings"] == MODULES[table] + 1
    assert seen["hits"] == (MODULES_PER_ROW[table] + 1) * seen["num_rows"]
    assert seen["estimate"]["num_modular"] == seen["num_rows"]
    assert found[table]["off"]["encodings"] == 0


@pytest.mark.parametrize("table", ["fields", "sets"])
def test_less_is_computed_than_with_the_best_prefixes(found: dict[str, Any], table: str) -> None:
    numbers = {modules: computed(seen) for modules, seen in found[table].items()}
    print(f"{table}: computed prompt tokens {numbers}")
    assert numbers["modular"] < numbers["repair"] < numbers["off"]
    assert numbers["modular"] < 0.5 * numbers["off"]


@pytest.mark.parametrize("table", ["fields", "sets"])
@pytest.mark.parametrize("modules", ["modular", "repair"])
def test_the_estimate_is_what_happens(found: dict[str, Any], table: str, modules: str) -> None:
    estimate, report = found[table][modules]["estimate"], found[table][modules]["report"]
    assert estimate["prompt_tokens"] == report["prompt_tokens"]
    # prompts with some of the same modules may also share what is computed anew of these
    shared = report["cached_tokens"] - estimate["cached_tokens"]
    assert shared == 0 if modules == "modular" else 0 <= shared < report["cached_tokens"] / 10
