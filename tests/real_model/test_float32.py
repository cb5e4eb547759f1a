# SPDX-License-Identifier: Apache-2.0
"""In float32, a real model answers as with stock vLLM, whatever relay adds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.integration.runs import assert_same_completions
from tests.real_model.engines import RELAY, RELAY_SPARSE, STOCK, run_engine, run_main
from tests.real_model.workload import TABLE, TABLE_CHOICES

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def relay(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("relay")
    return run_engine(smollm2, folder, RELAY, "chats", "table", "modules")


@pytest.fixture(scope="module")
def stock(
    smollm2: Path, relay: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Asked for the rows of the table with the prompts that llm_map made."""
    folder = tmp_path_factory.mktemp("stock")
    engine_args = {**STOCK, "table_prompts": relay["table"]["prompts"]}
    return run_engine(smollm2, folder, engine_args, "chats", "rows")


def test_chats_are_answered_as_by_stock_vllm(relay: dict[str, Any], stock: dict[str, Any]) -> None:
    assert_same_completions(relay["chats"], stock["chats"])
    assert len({tuple(each["token_ids"]) for each in stock["chats"]}) > 10
    metrics = relay["metrics"]
    assert 0 < metrics["relay:request_steps_shared"] < metrics["relay:request_steps"]
    assert metrics["relay:kv_tokens_read"] < 0.6 * metrics["relay:kv_tokens_logical"]


def test_the_prefix_cache_finds_the_same_tokens(
    relay: dict[str, Any], stock: dict[str, Any]
) -> None:
    cached = [each["cached_tokens"] for each in relay["chats"]]
    assert cached == [each["cached_tokens"] for each in stock["chats"]]
    assert cached[:2] == [0, 0] and min(cached[2:]) >= 288


def test_long_contexts_of_which_all_is_read(
    smollm2: Path, stock: dict[str, Any], tmp_path: Path
) -> None:
    sparse = run_engine(smollm2, tmp_path, RELAY_SPARSE, "chats")
    assert_same_completions(sparse["chats"], stock["chats"])
    assert sparse["metrics"]["relay:host_seconds"] > 0


def test_rows_of_a_table(smollm2: Path, relay: dict[str, Any], stock: dict[str, Any]) -> None:
    table = relay["table"]
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    for row, prompt in enumerate(map(tokenizer.decode, table["prompts"])):
        assert TABLE["house"][row] in prompt and TABLE["letter"][row] in prompt
    assert table["answers"] == stock["rows"]
    assert set(table["answers"]) <= set(TABLE_CHOICES) and len(set(table["answers"])) > 1


def test_modules_written_out_are_plain_text(relay: dict[str, Any]) -> None:
    modules = relay["modules"]
    assert len(modules["exact"]) == 3
    assert_same_completions(modules["exact"], modules["plain"])


def test_modules_give_the_log_probabilities_of_hugging_face(
    smollm2: Path, relay: dict[str, Any], tmp_path: Path
) -> None:
    """With the same positions and a mask that shows each token what it may see."""
    found, worst = tmp_path / "found.json", tmp_path / "worst.json"
    found.write_text(json.dumps(relay["modules"]["modular"]))
    run_main("reference_main", "modules", str(smollm2), str(found), str(worst))
    differences = json.loads(worst.read_text())
    assert len(differences) == 3
    assert max(differences) < 5e-4
    assert relay["metrics"]["relay:module_hits"] > 0
