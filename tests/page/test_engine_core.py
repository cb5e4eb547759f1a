# SPDX-License-Identifier: Apache-2.0
"""What engine cores with vLLM's scheduler and with relay's tell, with a stub for the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.request import Request

from tests.integration.tiny_models import save_model
from vllm_relay import plugin
from vllm_relay.page.source import Source
from vllm_relay.prefix_cache.predict.engine import (
    CacheSize,
    PredictorSettings,
    create_config,
    create_core,
)

BLOCK_SIZE = 32
BLOCKS = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model("llama", tmp_path_factory.mktemp("llama")))


@contextmanager
def a_core(model: str, eviction: str | None, page: bool = True) -> Iterator[Any]:
    plugin.register()
    relay = {"page": page}
    settings = PredictorSettings(
        model, eviction, BLOCK_SIZE, max_num_seqs=4, max_model_len=256, dtype="float32", relay=relay
    )
    more = {"additional_config": {"relay": relay}} if eviction is None else {}
    core: Any = create_core(create_config(settings, **more), CacheSize(blocks=BLOCKS))
    core.model_executor.sampler = lambda request_id: (
        [] if core.scheduler.requests[request_id].is_prefill_chunk else [3]
    )
    try:
        yield core
    finally:
        core.shutdown()


def begin(core: Any, name: str, tokens: list[int], output_tokens: int = 1) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)
    hasher = core.request_block_hasher
    core.add_request(Request(name, tokens, sampling, None, block_hasher=hasher))


def finish(core: Any) -> None:
    while core.scheduler.has_requests():
        core.step()


def look(core: Any, viewer: Source) -> None:
    asked = {viewer.feed: viewer.question(texts=False)} if viewer.feed else {}
    answer = core.relay_command("watch_forest", {"watcher": "me", "asked": asked})
    viewer.take(answer["result"])


@pytest.mark.parametrize("eviction", [None, "lru", "queue"])
def test_nodes_leave_in_the_order_that_is_told(model: str, eviction: str | None) -> None:
    viewer = Source("0", "rank 0", None, shares=False)
    with a_core(model, eviction) as core:
        common = [5] * 64
        for number in range(6):
            head = common if number % 2 else [number + 10] * 64
            begin(core, f"r{number}", [*head, *[number + 20] * 32, 9])
            finish(core)
        for _ in range(3):  # what is asked about follows from what was told
            look(core, viewer)
        nodes = {node["id"]: node for node in viewer.snapshot()["nodes"]}
        told = sorted(nodes, key=lambda each: nodes[each]["next_out"])
        assert [nodes[each]["next_out"] for each in told] == list(range(len(nodes)))
        assert sorted(node["hits"] for node in nodes.values()) == [0] * 6 + [2]
        # nodes are joined when others leave: they are followed by their last blocks
        last = {node.blocks[-1].key: node.id for node in viewer.forest.nodes.values()}
        left: list[int] = []
        pool = core.scheduler.kv_cache_manager.block_pool
        while pool.get_num_free_blocks():
            pool.get_new_blocks(1)
            look(core, viewer)
            there = {block.key for node in viewer.forest.nodes.values() for block in node.blocks}
            left += [node for key, node in last.items() if key not in there and node not in left]
        assert told == left


@pytest.mark.parametrize("eviction", [None, "queue"])
def test_what_runs_and_waits(model: str, eviction: str | None) -> None:
    viewer = Source("0", "rank 0", None, shares=True)
    with a_core(model, eviction) as core:
        for number in range(6):
            begin(core, f"r{number}", [*[5] * 64, number + 20], output_tokens=40)
        for _ in range(4):
            core.step()
        look(core, viewer)
        stats = viewer.snapshot()["stats"]
        assert (stats["running"], stats["waiting"]) == (4, {"capacity": 2})
        [node] = [each for each in viewer.snapshot()["nodes"] if each["running"] == 4]
        assert (node["tokens"], node["shared"], node["next_out"]) == (64, 4, None)
        assert node["requests"] == ["r0", "r1", "r2", "r3"]
        finish(core)
        look(core, viewer)
        stats = viewer.snapshot()["stats"]
        assert (stats["running"], stats["waiting"]) == (0, {})
        assert stats["memory_blocks"]["running"] == 0


def test_nothing_is_recorded_without_the_option(model: str) -> None:
    with a_core(model, "queue", page=False) as core:
        assert not hasattr(core.scheduler, "relay_page")
        assert "get_new_blocks" not in vars(core.scheduler.kv_cache_manager.block_pool)
        answer = core.relay_command("watch_forest", {"watcher": "me", "asked": {}})
        assert answer["error"]["status"] == 404
