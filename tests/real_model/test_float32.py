# SPDX-License-Identifier: Apache-2.0
"""In float32, a real model answers as with stock vLLM, whatever relay adds."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.integration.runs import assert_same_completions, num_comparable
from tests.real_model.engines import STOCK, relay_with, run_engine, run_main, sparse_with
from tests.real_model.generation import ANSWER_TOKENS
from tests.real_model.workload import (
    BLOCK_SIZE_TOKENS,
    DOCUMENT_TOKENS,
    IS_PRAISE,
    KINDS,
    REPLY,
    REPLY_TOKENS,
    SHARED_BEGINNING_TOKENS,
    TABLE,
    TABLE_CHOICES,
    conversations,
    rounds_of_chats,
    system_texts,
)
from tests.support.servers import ask, serving

pytestmark = pytest.mark.integration

PINNED_TOKENS = 160
REUSED_TOKENS = [DOCUMENT_TOKENS, SHARED_BEGINNING_TOKENS]
GREEDY = {
    "model": "tiny",
    "temperature": 0,
    "max_tokens": ANSWER_TOKENS,
    "ignore_eos": True,
    "return_token_ids": True,
}
"""Of completions and chats over HTTP."""
FEW_BLOCKS = 72
"""Fewer than the scenarios fill."""


@pytest.fixture(scope="module")
def relay(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two prompts are pinned from the beginning."""
    engine_args = relay_with(system_prompts=system_texts()[:1])
    engine_args["num_gpu_blocks_override"] = FEW_BLOCKS
    scenarios = ("pin", "chats", "table", "sql", "modules", "pinned")
    return run_engine(smollm2, tmp_path_factory.mktemp("relay"), engine_args, *scenarios)


@pytest.fixture(scope="module")
def stock(
    smollm2: Path, relay: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Asked for rows of tables with the prompts that llm_map and SQL made."""
    asked = relay["sql"]["asked"]
    rows = {
        "table": {
            "prompts": relay["table"]["prompts"],
            "choices": TABLE_CHOICES,
            "max_tokens": 8,
        },
        "kinds": {"prompts": list(asked[IS_PRAISE].values()), "choices": KINDS, "max_tokens": 8},
        "replies": {"prompts": list(asked[REPLY].values()), "max_tokens": REPLY_TOKENS},
    }
    scenarios = ("chats", "messages", "documents")
    folder = tmp_path_factory.mktemp("stock")
    return run_engine(smollm2, folder, {**STOCK, "rows": rows}, *scenarios)


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


def test_pinned_prompts_stay_when_others_leave(
    relay: dict[str, Any], stock: dict[str, Any]
) -> None:
    pinned = relay["pinned"]
    for pins in (relay["pin"], pinned["pins"]):
        entries = {each["id"]: (each["tokens"], each["resident"]) for each in pins}
        assert entries == dict.fromkeys(("system-0", "second"), (PINNED_TOKENS, True))
    # some of a system prompt that was not pinned has left, though all chats of it have used it
    assert all(each["cached_tokens"] < 288 for each in pinned["others"])
    assert min(each["cached_tokens"] for each in pinned["answers"]) == PINNED_TOKENS
    assert_same_completions(pinned["answers"], stock["messages"])
    metrics = relay["metrics"]
    assert metrics["relay:pinned_blocks"] == 2 * PINNED_TOKENS // BLOCK_SIZE_TOKENS


@pytest.fixture(scope="module")
def keeper(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """What an engine found that left a context behind, by the alpha of the default; the folder."""
    folder = tmp_path_factory.mktemp("contexts")
    engine_args = sparse_with(context_dir=str(folder))
    del engine_args["additional_config"]["relay"]["alpha"]
    found = run_engine(smollm2, tmp_path_factory.mktemp("keeper"), engine_args, "first_kept")
    return found, folder


@pytest.fixture(scope="module")
def sparse(
    smollm2: Path, keeper: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """An engine that reads everything, and was given the folder."""
    engine_args = sparse_with(context_dir=str(keeper[1]))
    scenarios = ("chats", "first_found", "second_kept")
    return run_engine(smollm2, tmp_path_factory.mktemp("sparse"), engine_args, *scenarios)


def test_long_contexts_of_which_all_is_read(sparse: dict[str, Any], stock: dict[str, Any]) -> None:
    assert_same_completions(sparse["chats"], stock["chats"])
    assert sparse["metrics"]["relay:host_seconds"] > 0


def test_a_stored_context_is_found_after_a_restart(
    keeper: tuple[Any, Path], sparse: dict[str, Any], stock: dict[str, Any]
) -> None:
    found = sparse["first_found"]
    [context] = found["contexts"]
    assert found["contexts"] == keeper[0]["first_kept"]["contexts"]
    assert (context["state"], context["num_tokens"]) == ("stored", DOCUMENT_TOKENS)
    assert [each["cached_tokens"] for each in found["answers"]] == REUSED_TOKENS
    assert_same_completions(found["answers"], stock["documents"][0])


def test_a_context_is_reused_by_the_engine_that_kept_it(
    sparse: dict[str, Any], stock: dict[str, Any]
) -> None:
    """By scans of codes at once, and with its indexes."""
    kept = sparse["second_kept"]
    assert [each["state"] for each in kept["contexts"]] == ["stored", "stored"]
    for answers in kept["answers"]:
        assert [each["cached_tokens"] for each in answers] == REUSED_TOKENS
        assert_same_completions(answers, stock["documents"][1])


def test_with_the_alpha_of_the_default_not_all_is_read(
    keeper: tuple[Any, Path], stock: dict[str, Any], record_property: Callable[[str, Any], None]
) -> None:
    """Answers may differ from those of dense attention: how many tokens do is only recorded."""
    found, _ = keeper
    for answers in found["first_kept"]["answers"]:
        assert [each["cached_tokens"] for each in answers] == REUSED_TOKENS
        equal = [
            len(os.path.commonprefix([ours["token_ids"], theirs["token_ids"]]))
            for ours, theirs in zip(answers, stock["documents"][0], strict=True)
        ]
        record_property("equal_tokens", equal)
    metrics = found["metrics"]
    searched = metrics["relay:host_searched_tokens"]
    assert 0 < metrics["relay:host_retrieved_tokens"] < 0.9 * searched


def test_rows_of_a_table(smollm2: Path, relay: dict[str, Any], stock: dict[str, Any]) -> None:
    table = relay["table"]
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    for row, prompt in enumerate(map(tokenizer.decode, table["prompts"])):
        assert TABLE["house"][row] in prompt and TABLE["letter"][row] in prompt
    assert table["answers"] == [each["text"] for each in stock["rows"]["table"]]
    assert set(table["answers"]) <= set(TABLE_CHOICES) and len(set(table["answers"])) > 1


def test_sql(smollm2: Path, relay: dict[str, Any], stock: dict[str, Any]) -> None:
    """The condition keeps the rows, and the replies are those, that stock vLLM's answers give."""
    asked = relay["sql"]["asked"]
    kinds = dict(zip(map(int, asked[IS_PRAISE]), stock["rows"]["kinds"], strict=True))
    assert sorted(kinds) == list(range(1, len(TABLE["letter"])))
    complaints = [number for number in sorted(kinds) if kinds[number]["text"] == "complaint"]
    assert 0 < len(complaints) < len(kinds)
    rows = relay["sql"]["rows"]
    assert [number for number, _ in rows] == complaints == sorted(map(int, asked[REPLY]))
    replies = dict(zip(map(int, asked[REPLY]), stock["rows"]["replies"], strict=True))
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    for number, text in rows:
        reply = replies[number]
        beginning = tokenizer.decode(reply["token_ids"][: num_comparable(reply)])
        assert len(beginning.split()) > 4
        assert text.startswith(beginning.strip())
        if num_comparable(reply) == len(reply["token_ids"]):
            assert text == reply["text"].strip()


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


def test_server(smollm2: Path, stock: dict[str, Any], tmp_path: Path) -> None:
    """Prompts that run together, a pinned prompt, and chats of which half begin with it."""
    log = tmp_path / "log"
    options = ["--attention-backend", "relay", "--block-size", str(BLOCK_SIZE_TOKENS)]
    options += ["--max-model-len", "1024", "--num-gpu-blocks-override", "192"]
    options += ["--enable-prompt-tokens-details"]
    # else vLLM kills its engine core while others wait for it
    options += ["--shutdown-timeout", "30"]
    system = {"role": "system", "content": system_texts()[0]}
    with serving(smollm2, log, {"scheduler": True}, options) as server:
        pin = post(f"{server}/relay/pins", {"messages": [system], "id": "first"})
        assert (pin["tokens"], pin["resident"]) == (PINNED_TOKENS, True)
        rounds = [
            post(f"{server}/v1/completions", {**GREEDY, "prompt": prompts})
            for prompts in rounds_of_chats(str(smollm2))
        ]
        chats = [
            post(f"{server}/v1/chat/completions", {**GREEDY, "messages": messages})
            for messages in conversations()
        ]
        page = ask("GET", f"{server}/metrics")[1]
        assert "Traceback" not in log.read_text()
    assert_same_completions([each for one in rounds for each in one["choices"]], stock["chats"])
    assert_same_completions([each["choices"][0] for each in chats], stock["messages"])
    assert chats[0]["usage"]["prompt_tokens_details"]["cached_tokens"] == PINNED_TOKENS
    metrics = dict(re.findall(r"^relay:(\w+){.*} (.+)$", page, re.MULTILINE))
    assert float(metrics["pinned_blocks"]) == PINNED_TOKENS // BLOCK_SIZE_TOKENS
    assert float(metrics["request_steps_shared_total"]) > 0
    logical, read = (float(metrics[f"kv_tokens_{each}_total"]) for each in ("logical", "read"))
    assert read < 0.6 * logical
    assert "Application shutdown complete." in log.read_text()


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    status, page = ask("POST", url, body)
    assert status in (200, 201), page
    return json.loads(page)
