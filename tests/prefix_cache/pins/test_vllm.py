# SPDX-License-Identifier: Apache-2.0
"""Pins in a real LLM and a real server."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.tiny_models import MAX_MODEL_LEN_TOKENS, save_model
from tests.prefix_cache.pins.random_requests import RandomRequests
from tests.support.servers import ask, forest_events, serving
from tests.support.vllm_processes import run_module
from tests.support.waiting import wait_for

pytestmark = pytest.mark.integration

SYSTEM_PROMPT = "river amber stone " * 40
BLOCK_SIZE = 32
PINNED_TOKENS = 120 // BLOCK_SIZE * BLOCK_SIZE
# 2 layers, K and V, 2 heads of 32 numbers of 4 bytes
PINNED_BYTES = PINNED_TOKENS * 2 * 2 * 2 * 32 * 4
PINNED_AT_START = (
    f"vllm-relay: pinned system prompts: 1, tokens: {PINNED_TOKENS}, "
    f"KV blocks: {PINNED_TOKENS // BLOCK_SIZE}, bytes in one worker: {PINNED_BYTES:,}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from vllm_relay.demo.tokenizer import build_tokenizer

    directory = save_model("llama", tmp_path_factory.mktemp("model"))
    build_tokenizer(MAX_MODEL_LEN_TOKENS).save_pretrained(directory)
    return directory


def run_engine(
    main: str, model: Path, output: Path, **environment: str
) -> tuple[dict[str, Any], list[str]]:
    """What the script has seen, and the lines of its log about system prompts."""
    done = run_module(
        f"tests.prefix_cache.pins.{main}",
        [str(model), SYSTEM_PROMPT, str(output)],
        {"VLLM_LOGGING_LEVEL": "INFO", **environment},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    log = (done.stdout + done.stderr).splitlines()
    return json.loads(output.read_text()), [line for line in log if "pinned system" in line]


@pytest.mark.parametrize(
    "multiprocessing",
    [
        pytest.param(False, marks=pytest.mark.soak, id="in_process"),
        pytest.param(True, id="two_processes"),
    ],
)
def test_llm(model: Path, tmp_path: Path, multiprocessing: bool) -> None:
    seen, logged = run_engine(
        "engine_main",
        model,
        tmp_path / "output.json",
        VLLM_ENABLE_V1_MULTIPROCESSING=str(int(multiprocessing)),
    )
    [line] = logged
    assert line.endswith(PINNED_AT_START)
    [system] = seen["at_start"]
    assert (system["id"], system["tokens"], system["resident"]) == ("system-0", 96, True)
    assert seen["pin"]["id"] == "a"
    assert seen["pin"]["tokens"] == PINNED_TOKENS
    assert seen["pin"] == seen["same"]
    assert seen["pin"]["blocks"] == 3
    assert seen["pin"]["bytes"] == PINNED_BYTES
    assert seen["text"]["tokens"] == PINNED_TOKENS
    assert {status for status, _ in seen["errors"]} == {400}, seen["errors"]
    assert "expected at least 32 tokens" in seen["errors"][0][1]
    assert "vLLM does not take this text: This model's maximum" in seen["errors"][1][1]
    assert "vLLM does not take these tokens: " in seen["errors"][2][1]
    assert seen["cached_after_flood"] == [PINNED_TOKENS, PINNED_TOKENS]
    assert {(each["tokens"], each["hits"]) for each in seen["top"]} >= {(PINNED_TOKENS, 1)}
    assert seen["reset"]
    assert seen["resident_after_reset"] == [False, False]
    assert seen["cached_after_reset"] == [0, 0]
    assert seen["cached_after_second_flood"] == [PINNED_TOKENS, PINNED_TOKENS]
    assert seen["cached_after_unpin"][0] == PINNED_TOKENS
    assert seen["cached_after_unpin"][1] < PINNED_TOKENS
    assert seen["left"] == ["system-0"]
    metrics = seen["metrics"]
    assert metrics["relay:pinned_blocks"] == 3
    assert metrics["relay:pinned_bytes"] == seen["pin"]["bytes"]
    assert seen["pinned_blocks_when_idle"] == [6, 3, 0]
    assert metrics["relay:prefix_hit_tokens"] >= 5 * PINNED_TOKENS
    assert metrics["relay:prefix_hit_tokens"] < metrics["relay:prefix_query_tokens"]
    assert metrics["relay:evicted_blocks"] > 0
    assert metrics["relay:steps"] > 0


def test_async_llm_without_a_server(model: Path, tmp_path: Path) -> None:
    """Its first two requests arrive together, and both find the prompt."""
    seen, logged = run_engine("async_engine_main", model, tmp_path / "output.json")
    [system] = seen["pins"]
    assert (system["id"], system["tokens"], system["resident"]) == ("system-0", PINNED_TOKENS, True)
    assert seen["cached_at_first"] == [PINNED_TOKENS, PINNED_TOKENS]
    assert seen["cached_after_flood"] == PINNED_TOKENS
    [line] = logged
    assert line.endswith(PINNED_AT_START)


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[str]:
    """The address of a server with a pinned system prompt."""
    prompt = tmp_path / "system_prompt.txt"
    prompt.write_text(SYSTEM_PROMPT)
    relay = {"scheduler": True, "system_prompts": [f"@{prompt}"], "page": True}
    options = ["--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", "48"]
    with serving(model, tmp_path / "server.log", relay, options) as address:
        yield address


def test_server(server: str, tmp_path: Path) -> None:
    log = (tmp_path / "server.log").read_text()
    assert log.count(PINNED_AT_START) == log.count("pinned system prompts") == 1
    pins = f"{server}/relay/pins"
    assert ask("GET", pins, key="wrong")[0] == 401
    status, page = ask("GET", pins)
    [system] = json.loads(page)["pins"]
    assert status == 200
    assert (system["id"], system["tokens"], system["resident"]) == ("system-0", PINNED_TOKENS, True)
    messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": "stone"}]
    chat = {"model": "tiny", "max_tokens": 1, "messages": messages}
    assert ask("POST", f"{server}/v1/chat/completions", chat)[0] == 200
    status, page = ask("POST", pins, {"messages": messages, "id": "chat"})
    assert (status, json.loads(page)["tokens"]) == (201, PINNED_TOKENS)
    status, page = ask("POST", pins, {"text": SYSTEM_PROMPT, "id": "text"})
    assert (status, json.loads(page)["tokens"]) == (201, PINNED_TOKENS)
    assert ask("POST", pins, {"prompt_token_ids": [9] * 64, "id": "text"})[0] == 409
    status, page = ask("POST", pins, {"prompt_token_ids": [10**6] * 64})
    assert (status, "vocabulary" in page) == (400, True)
    assert ask("DELETE", f"{pins}/text")[0] == 204
    assert ask("DELETE", f"{pins}/text")[0] == 404
    assert len(json.loads(ask("GET", pins)[1])["pins"]) == 2
    assert ask("DELETE", f"{pins}/system-0")[0] == 403
    assert pinned_blocks(server) == {"0": 3}
    check_live_page(server)
    requests = RandomRequests(seed=3)
    for _ in range(100):
        method, path, body = requests.next()
        status, page = ask(method, f"{server}/relay/{path}", body)
        assert status < 500 or status in (501, 507), (method, path, body, page)
    for pin in json.loads(ask("GET", pins)[1])["pins"]:
        ask("DELETE", f"{pins}/{pin['id']}")
    assert ask("POST", pins, {"prompt_token_ids": [9] * 64, "id": "more", "ttl_s": 2})[0] == 201
    assert pinned_blocks(server) == {"0": 5}
    # nothing runs from here on
    wait_for(lambda: pinned_blocks(server) == {"0": 3})
    assert ask("POST", f"{server}/v1/chat/completions", chat)[0] == 200
    metrics = ask("GET", f"{server}/metrics")[1]
    # both chats, and the request for the pin "chat", whose last block is computed again
    hit_tokens = 3 * PINNED_TOKENS - BLOCK_SIZE
    labels = 'engine="0",model_name="tiny"'
    assert f"relay:prefix_hit_tokens_total{{{labels}}} {hit_tokens}.0" in metrics


def check_ranks_on_live_page(server: str) -> None:
    """Both have the same pins; any process of the server pins what another one shows."""
    with forest_events(server) as events:
        [_, (first, one), (second, other)] = [next(events) for _ in range(3)]
        assert first == second == "snapshot"
        assert {one["source"], other["source"]} == {"0", "1"}
        pinned = [
            {node["id"] for node in each["nodes"] if node["pinned_tokens"]} for each in (one, other)
        ]
        assert len(pinned[0]) == 2 and pinned[0] == pinned[1]
        for _ in range(4):  # whichever process answers
            for node in pinned[0]:
                body = {"source": "1", "node": node, "id": f"node-{node}"}
                status, page = ask("POST", f"{server}/relay/pins", body)
                assert (status, json.loads(page)["blocks"]) == (201, 3)
        for node in pinned[0]:
            assert ask("DELETE", f"{server}/relay/pins/node-{node}")[0] == 204


def check_live_page(server: str) -> None:
    """What it tells of the pinned system prompt, of a prompt that comes, and of evicted ones."""
    assert ask("GET", f"{server}/relay/forest/events", key="wrong")[0] == 401
    assert ask("GET", f"{server}/relay/", key="wrong")[0] == 200
    with forest_events(server) as events:
        kind, hello = next(events)
        assert (kind, hello["texts"], hello["block_size_tokens"]) == ("hello", True, BLOCK_SIZE)
        assert hello["sources"] == [{"id": "0", "name": "rank 0"}]
        kind, snapshot = next(events)
        assert kind == "snapshot"
        [system] = [node for node in snapshot["nodes"] if node["pinned_tokens"]]
        assert (system["tokens"], system["parent"]) == (PINNED_TOKENS, None)
        assert system["hits"] > 0 and system["next_out"] is None
        assert snapshot["stats"]["memory_blocks"]["pinned"] == 3
        nodes = {node["id"]: node for node in snapshot["nodes"]}
        _until(events, nodes, lambda: "river amber" in (nodes[system["id"]]["text"] or ""))
        prompt = [*range(300, 300 + 2 * BLOCK_SIZE), 9]
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
        assert ask("POST", f"{server}/v1/completions", body)[0] == 200
        _until(events, nodes, lambda: len(nodes) == len(snapshot["nodes"]) + 1)
        new = max(nodes.values(), key=lambda node: node["last_used_s"])
        assert (new["tokens"], new["parent"], new["pinned_tokens"]) == (2 * BLOCK_SIZE, None, 0)
        evict = f"{server}/relay/forest/evict"
        status, page = ask("POST", evict, {"source": "0", "node": system["id"]})
        assert (status, "pinned" in page) == (409, True)
        assert ask("POST", evict, {"source": "0", "node": new["id"]}, key="wrong")[0] == 401
        status, page = ask("POST", evict, {"source": "0", "node": new["id"]})
        assert (status, json.loads(page)) == (200, {"evicted_blocks": 2})
        _until(events, nodes, lambda: new["id"] not in nodes)


def _until(
    events: Iterator[tuple[str, Any]], nodes: dict[int, Any], done: Callable[[], bool]
) -> None:
    """Take over what is told until it is so."""
    while not done():
        kind, data = next(events)
        assert kind == "delta"
        for number in data["removed"]:
            del nodes[number]
        nodes |= {node["id"]: node for node in data["added"]}
        for change in data["changed"]:
            nodes[change["id"]] |= change


def pinned_blocks(server: str) -> dict[str, float]:
    """By rank, as the metrics have them."""
    page = ask("GET", f"{server}/metrics")[1]
    found = re.findall(r'^relay:pinned_blocks{engine="(\d+)",.*} (.*)$', page, re.MULTILINE)
    return {rank: float(blocks) for rank, blocks in found}


@pytest.mark.parametrize(
    "spawns", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["forked", "with_metrics"]
)
def test_server_of_several_ranks_and_processes(
    model: Path, tmp_path: Path, spawns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # vLLM 0.33 else wants a NUMA node for each rank
    monkeypatch.setenv("VLLM_CPU_SIM_MULTI_NUMA", "1")
    relay = {"scheduler": True, "system_prompts": [SYSTEM_PROMPT], "page": True}
    options = ["--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", "48"]
    options += ["--data-parallel-size", "2", "--api-server-count", "2"]
    options += ["--enable-prompt-tokens-details"]
    with serving(model, tmp_path / "server.log", relay, options, spawns=spawns) as server:
        pins = f"{server}/relay/pins"
        prompt = [3 + 7 * i % 300 for i in range(96)]
        made = json.loads(ask("POST", pins, {"prompt_token_ids": prompt, "id": "a"})[1])
        ranks = [{"rank": rank, "blocks": 3, "bytes": 98304, "resident": True} for rank in (0, 1)]
        assert made["ranks"] == [{**rank, "problem": None} for rank in ranks]
        for _ in range(4):  # whichever process answers
            found = json.loads(ask("GET", pins)[1])["pins"]
            assert [(pin["id"], pin["resident"]) for pin in found] == [
                ("system-0", True),
                ("a", True),
            ]
            assert all(pin["ranks"] == made["ranks"] for pin in found)
            # what counts for several processes is decided when it is imported
            assert pinned_blocks(server) == ({"0": 6, "1": 6} if spawns else {})
        body = {"model": "tiny", "prompt": [*prompt, 5, 6], "max_tokens": 1}
        for rank in (0, 1):
            status, page = ask(
                "POST", f"{server}/v1/completions", body, headers={"X-data-parallel-rank": rank}
            )
            assert status == 200
            usage = json.loads(page)["usage"]["prompt_tokens_details"]
            assert usage["cached_tokens"] == 96
        check_ranks_on_live_page(server)
        assert ask("DELETE", f"{pins}/system-0")[0] == 403
        assert ask("DELETE", f"{pins}/a")[0] == 204
        assert ask("DELETE", f"{pins}/a")[0] == 404
        assert pinned_blocks(server) == ({"0": 3, "1": 3} if spawns else {})
