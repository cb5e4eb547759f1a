# SPDX-License-Identifier: Apache-2.0
"""Each script of examples/ with the demo's real model: what its last line says to look at."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.servers import API_KEY, serving
from tests.support.vllm_processes import run_module

FOLDER = Path(__file__).parents[2] / "examples"
TRAVEL = [str(FOLDER / "modules" / name) for name in ("travel.xml", "travel_prompt.xml")]

pytestmark = [pytest.mark.examples, pytest.mark.integration]


def numbers_to_look_at(script: str, *arguments: str, **environment: str) -> list[int]:
    """Those of the last line that a script prints."""
    done = run_module(
        "tests.examples.example_main",
        [str(FOLDER / script), *arguments],
        {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **environment},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    last = done.stdout.rstrip().splitlines()[-1]
    assert last.startswith("Look at: "), done.stdout
    return [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", last)]


def test_every_script_is_run() -> None:
    source = Path(__file__).read_text()
    scripts = [path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.py")]
    assert [script for script in scripts if f'"{script}"' not in source] == []


def test_chats_read_less_than_they_attend_to(smollm2: Path) -> None:
    chats, logical, read = numbers_to_look_at("chat.py", str(smollm2))
    assert chats == 8
    assert 0 < read < logical / 2


def test_a_client_sees_what_its_server_shares(smollm2: Path, tmp_path: Path) -> None:
    options = ["--attention-backend", "RELAY", "--max-model-len", "2048"]
    with serving(smollm2, tmp_path / "log", {"scheduler": True}, options) as address:
        logical, read = numbers_to_look_at("client.py", address, VLLM_API_KEY=API_KEY)
    assert 0 < read < logical


def test_the_predicted_hits_are_those_of_the_order(smollm2: Path) -> None:
    cache_tokens, stock, relay = numbers_to_look_at("predict_prompts.py", str(smollm2))
    assert cache_tokens == 3072
    assert stock < relay <= 100


def test_films_are_judged(smollm2: Path) -> None:
    rows, prompts, tokens, cached = numbers_to_look_at("tables_movies.py", str(smollm2))
    assert (rows, prompts) == (8, 6)
    assert 0 <= cached < tokens


def test_questions_are_answered_by_passages(smollm2: Path) -> None:
    pytest.importorskip("faiss")
    prompts, tokens, cached = numbers_to_look_at("tables_retrieval.py", str(smollm2))
    assert prompts == 26
    assert 0 < cached < tokens


def test_modules_are_cached_for_the_first_prompt(smollm2: Path) -> None:
    tokens, first, second = numbers_to_look_at("modules/ask.py", str(smollm2), *TRAVEL)
    assert 0 < first <= second < tokens
