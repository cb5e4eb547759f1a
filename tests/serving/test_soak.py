# SPDX-License-Identifier: Apache-2.0
"""A server under polite and hostile clients; run with `-m soak`, RELAY_SOAK_S seconds long."""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.integration.tiny_models import MAX_MODEL_LEN_TOKENS, save_adapter, save_model
from tests.serving.soak.client import Client
from tests.serving.soak.hostile import MAX_BODY_BYTES, HostileClients
from tests.serving.soak.polite import PoliteClient
from tests.serving.soak.questions import ADAPTERS, CONFIGURED, POSTED, Questions
from tests.serving.soak.record import Memory, Record
from tests.support.servers import API_KEY, server_process

pytestmark = [pytest.mark.integration, pytest.mark.soak]

SECONDS = float(os.environ.get("RELAY_SOAK_S", "60"))
OTHER_KEY = "other"
NUM_POLITE = 10
NUM_BLOCKS = 49
MAX_NUM_SEQS = 16
MAX_OVERTAKES = 8
BLOCK_SIZE = 32
PINNED_BLOCKS = 3  # of the system prompt
SETTLES_WITHIN_S = 60.0
LOOKS_EVERY_S = 0.5
# the last third's memory over the middle third's; its worker takes most of it in the first minutes
MAX_GROWTH = 1.1 if SECONDS >= 300 else 1.25
RELAY = {
    "scheduler": True,
    "routes": "open",
    "max_hold_s": 0.2,
    "max_overtakes": MAX_OVERTAKES,
    "max_schemas": 8,
    "max_schema_tokens": 20_000,
    "max_markup_bytes": MAX_BODY_BYTES,
}
GAUGES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "relay:held_requests",
    "relay:leading_requests",
    "relay:blocked_requests",
    "relay:overtaken_requests",
)
COUNTERS = (
    "vllm:num_preemptions",
    "relay:evicted_blocks",
    "relay:overtakes",
    "relay:prefix_hit_tokens",
    "relay:module_encodings",
    "relay:request_steps_shared",
)


def options_of(folder: Path) -> list[str]:
    """For `vllm serve`."""
    adapters = [
        f"{name}={save_adapter(folder / name, 7 + i)}" for i, name in enumerate(ADAPTERS[1:])
    ]
    return [
        *("--api-key", API_KEY, OTHER_KEY),
        *("--attention-backend", "relay", "--scheduling-policy", "priority"),
        *("--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", str(NUM_BLOCKS)),
        *("--max-num-seqs", str(MAX_NUM_SEQS), "--max-num-batched-tokens", "256"),
        *("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8"),
        *("--lora-modules", *adapters),
        *("--enable-prompt-tokens-details",),
    ]


async def metrics_of(client: Client) -> dict[str, float]:
    """Sums over all labels, by name."""
    began_s = time.monotonic()
    _, page = await client.send("metrics", "GET", "/metrics")
    client.record.took("metrics", time.monotonic() - began_s)
    found: dict[str, float] = {}
    for name, value in re.findall(r"^([\w:]+?)(?:_total)?\{.*\} (\S+)$", page, re.MULTILINE):
        found[name] = found.get(name, 0.0) + float(value)
    return found


async def look(client: Client, memory: Memory, goes_on: Callable[[], bool]) -> None:
    """What an operator sees meanwhile."""
    while goes_on():
        memory.look()
        metrics = await metrics_of(client)
        for name in (*GAUGES, "relay:pinned_blocks"):
            client.record.saw(f"most {name}", int(metrics[name]))
        due_s, computed_s = time.monotonic() + LOOKS_EVERY_S, time.thread_time()
        await asyncio.sleep(LOOKS_EVERY_S)
        client.record.took("all clients stood still", time.monotonic() - due_s)
        client.record.took("all clients computed", time.thread_time() - computed_s)


async def settled(client: Client) -> dict[str, float]:
    """The metrics, when nothing is left but what the configuration pinned."""
    deadline_s = time.monotonic() + SETTLES_WITHIN_S
    while True:
        metrics = await metrics_of(client)
        left = {name: metrics[name] for name in GAUGES if metrics[name]}
        if not left and metrics["relay:pinned_blocks"] == PINNED_BLOCKS:
            return metrics
        if time.monotonic() > deadline_s:
            client.record.problem("left", f"{left}, {metrics['relay:pinned_blocks']} blocks pinned")
            return metrics
        await asyncio.sleep(0.2)


async def run(address: str, questions: Questions, memory: Memory, record: Record) -> dict[str, Any]:
    """What clients and an operator have seen."""
    # else the server may close an old connection just when it is used again
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        mine, other = (Client(session, address, key, record) for key in (API_KEY, OTHER_KEY))
        body = questions.schemas[POSTED].encode()
        assert (await mine.send("schema", "POST", "/relay/schemas", body))[0] == 201
        await questions.answer(mine)
        record.turns = type(record.turns)()
        pins = [f"polite-{number}" for number in range(NUM_POLITE)]
        hostile = HostileClients(other, pins, seed=1)
        polite = [
            PoliteClient(mine, questions, number, MAX_NUM_SEQS, MAX_OVERTAKES)
            for number in range(NUM_POLITE)
        ]
        end_s = time.monotonic() + SECONDS

        def goes_on() -> bool:
            return time.monotonic() < end_s

        await asyncio.gather(
            look(mine, memory, goes_on),
            hostile.run_while(goes_on),
            *(client.run_while(goes_on) for client in polite),
        )
        await hostile.unpin_all()
        await settled(mine)
        await questions.check_alone(mine)
        return await settled(mine)


def test_a_server_bears_them_all(tmp_path: Path) -> None:
    from vllm_relay.demo.tokenizer import build_tokenizer

    faulthandler.dump_traceback_later(SECONDS + 600, exit=True)  # in place of pytest's own limit
    model = save_model("llama", tmp_path / "model")
    tokenizer = build_tokenizer(MAX_MODEL_LEN_TOKENS)
    tokenizer.save_pretrained(model)
    questions = Questions(sorted(word for word in tokenizer.get_vocab() if word.isalpha()), seed=0)
    (tmp_path / "schema.xml").write_text(questions.schemas[CONFIGURED])
    relay = RELAY | {
        "system_prompts": ["river amber stone " * 40],
        "schemas": [str(tmp_path / "schema.xml")],
    }
    log, record = tmp_path / "log", Record()
    main, options = "tests.serving.soak.server_main", options_of(tmp_path)
    with server_process(model, log, relay, options, main=main) as (process, address):
        assert process.pid is not None
        memory = Memory(process.pid)
        metrics = asyncio.run(run(address, questions, memory, record))
        assert process.is_alive()
        num_tracebacks = log.read_text().count("Traceback")  # before the server is ended
    found = {
        "counts": record.counts,
        "statuses": record.statuses,
        "metrics": {name: metrics[name] for name in COUNTERS},
        "longest_s": {name: round(value, 2) for name, value in record.longest_s.items()},
        "most": record.most,
        "memory_mib": memory.growth(),
        "memory_mib_meanwhile": memory.tenths(),
        "tracebacks": num_tracebacks,
    }
    print(json.dumps(found, indent=1, sort_keys=True))
    if record.problems:
        pytest.fail("\n".join(record.problems), pytrace=False)
    assert num_tracebacks == 0, log
    # of the last step, which freed its request: no block has leaked
    assert metrics["vllm:kv_cache_usage_perc"] == pytest.approx(PINNED_BLOCKS / (NUM_BLOCKS - 1))
    for name in COUNTERS:
        assert metrics[name] > 0, name
    for name in ("polite answered", "polite modular answered", "aborted", "pins used"):
        assert record.counts[name] > 0, name
    for middle, last in memory.growth():
        assert last < middle * MAX_GROWTH, memory.growth()
