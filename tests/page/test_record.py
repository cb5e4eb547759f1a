# SPDX-License-Identifier: Apache-2.0
"""What a feed tells of vLLM's own block pool, without a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request

from tests.prefix_cache.pins.pin_scheduler import BLOCK_SIZE, HAS_LOOKAHEAD_HASHES, Scheduler
from tests.support.depth import cases
from vllm_relay.commands.errors import CommandError
from vllm_relay.modules.prompt.block_hashes import module_block_hasher
from vllm_relay.modules.prompt.plan import EXTRA_ARG, ModulePlan, Segment, TailRun
from vllm_relay.page.blocks import unpack
from vllm_relay.page.feed import FORGET_S, MAX_WATCHERS, Feed
from vllm_relay.page.recording import record
from vllm_relay.page.source import Source


class Recorded(Scheduler):
    """A scheduler whose blocks are recorded, in virtual time."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.waiting = Waiting()
        self.feed: Feed = record(self)
        self.clock_s = 1000.0
        self.feed._clock = self.feed.record._clock = lambda: self.clock_s

    def _free_request_blocks(self, request: Any) -> None:
        self.kv_cache_manager.free(request)

    def prefill(self, request: Any, num_tokens: int | None = None) -> int:
        cached = super().prefill(request, num_tokens)
        self.kv_cache_manager.record_prefix_cache_stats(request, cached)
        self.running.append(request)
        return cached

    def free(self, request: Any) -> None:
        self.running.remove(request)
        self.pins.before_free(request)
        self._free_request_blocks(request)
        self.clock_s += 1.0

    def cached(self) -> dict[int, Any]:
        """The blocks that the prefix cache finds, by id."""
        pool = self.kv_cache_manager.block_pool
        return {each.block_id: each for each in pool.blocks if each.block_hash is not None}


class Waiting(list[Any]):
    held_requests = leading_requests = blocked_requests = 0


def source() -> Source:
    return Source("0", "rank 0", lambda tokens: " ".join(map(str, tokens)), shares=True)


def look(scheduler: Recorded, viewer: Source, texts: bool = False, name: str = "me") -> Any:
    asked = {viewer.feed: viewer.question(texts)} if viewer.feed else {}
    return viewer.take(scheduler.feed.poll(name, asked))


def shape(viewer: Source) -> list[tuple[int | None, int, int]]:
    """Parent, blocks and hits of all nodes, by the numbers of their order."""
    nodes = sorted(viewer.snapshot()["nodes"], key=lambda node: node["id"])
    place = {node["id"]: index for index, node in enumerate(nodes)}
    return [(place.get(node["parent"]), node["blocks"], node["hits"]) for node in nodes]


def test_prompts_that_begin_alike_are_one_tree() -> None:
    scheduler, viewer = Recorded(), source()
    common = list(range(8))
    scheduler.run([*common, 50, 51, 52, 53, 54])
    kind, data = look(scheduler, viewer)
    assert kind == "snapshot" and data["source"] == "0"
    assert shape(viewer) == [(None, 3, 0)]
    assert scheduler.run([*common, 60, 61, 62, 63, 64]) == 8
    kind, data = look(scheduler, viewer)
    assert kind == "delta" and len(data["added"]) == 2
    assert shape(viewer) == [(None, 2, 1), (0, 1, 0), (0, 1, 0)]
    assert scheduler.run([*common, 60, 61, 62, 63, 64]) == 12
    look(scheduler, viewer)
    assert sorted(node["hits"] for node in viewer.snapshot()["nodes"]) == [0, 1, 2]
    assert look(scheduler, viewer) is None  # nothing is new


def test_the_hits_of_what_has_left_stay_with_what_it_continued() -> None:
    scheduler, viewer = Recorded(num_blocks=12), source()
    for _ in range(3):
        scheduler.run(list(range(13)))
    look(scheduler, viewer)
    assert shape(viewer) == [(None, 3, 2)]
    scheduler.run([100 + token for token in range(37)])  # takes all blocks but one
    look(scheduler, viewer)
    by_blocks = {node["blocks"]: node["hits"] for node in viewer.snapshot()["nodes"]}
    assert by_blocks == {1: 2, 9: 0}


def test_hits_go_on_past_others_that_leave_between() -> None:
    scheduler, viewer = Recorded(), source()
    for _ in range(2):
        scheduler.run([*range(12), 50])
    scheduler.run([*range(100, 104), 50])
    blocks = scheduler.feed.record
    places = {blocks.tokens(i)[0]: i for i, entry in enumerate(blocks.cached) if entry is not None}
    blocks.on_evicted([places[8], places[100], places[4]])
    look(scheduler, viewer)
    assert shape(viewer) == [(None, 1, 1)]


def test_running_requests_and_memory() -> None:
    scheduler, viewer = Recorded(), source()
    first, second = (scheduler.request([*range(8), token, 1, 2, 3, 4]) for token in (50, 60))
    scheduler.prefill(first)
    scheduler.prefill(second)
    scheduler.pin("a", list(range(100, 109)))
    look(scheduler, viewer)
    found = viewer.snapshot()["nodes"]
    nodes = {node["blocks"]: node for node in found if not node["pinned_tokens"]}
    assert nodes[2]["running"] == nodes[2]["shared"] == 2
    assert nodes[2]["requests"] == [first.request_id, second.request_id]
    assert (nodes[1]["running"], nodes[1]["shared"]) == (1, 0)
    stats = viewer.snapshot()["stats"]
    # 2 shared blocks, and for each request one that is full and one that is not
    assert stats["memory_blocks"] == {
        "total": 30, "running": 6, "cached": 0, "pinned": 2, "modules": 0, "free": 22,
    }  # fmt: skip
    assert stats["running"] == 2
    scheduler.free(first)
    scheduler.free(second)
    look(scheduler, viewer)
    memory = viewer.snapshot()["stats"]["memory_blocks"]
    assert memory == {"total": 30, "running": 0, "cached": 4, "pinned": 2, "modules": 0, "free": 24}
    found = viewer.snapshot()["nodes"]
    assert [node["next_out"] for node in found if node["pinned_tokens"]] == [None]
    assert not any(node["running"] for node in found)


def test_what_a_preempted_request_finds_again_is_no_hit() -> None:
    scheduler, viewer = Recorded(), source()
    scheduler.run([*range(8), 50])
    again = scheduler.request([*range(8), 60])
    again.num_preemptions = 1
    assert scheduler.prefill(again) == 8
    look(scheduler, viewer)
    [node] = viewer.snapshot()["nodes"]
    stats = viewer.snapshot()["stats"]
    assert (node["hits"], node["running"]) == (0, 1)
    assert (stats["prefix_hit_tokens"], stats["prefix_query_tokens"]) == (0, 9)


def test_a_pin_that_ends_inside_a_node_lets_the_rest_leave() -> None:
    scheduler, viewer = Recorded(), source()
    scheduler.run([*range(16), 50])
    scheduler.pin("a", list(range(9)))
    look(scheduler, viewer)
    look(scheduler, viewer)
    [node] = viewer.snapshot()["nodes"]
    assert (node["tokens"], node["pinned_tokens"], node["next_out"]) == (16, 8, 0)
    scheduler.pin("b", list(range(17)))
    look(scheduler, viewer)
    [node] = viewer.snapshot()["nodes"]
    assert (node["pinned_tokens"], node["next_out"]) == (16, None)


prompts = st.lists(st.integers(0, 2), min_size=2, max_size=8).map(
    lambda blocks: [token for block in blocks for token in (block, 1, 2, 3)] + [9]
)
actions = st.one_of(
    st.tuples(st.just("run"), prompts),
    st.tuples(st.just("begin"), prompts),
    st.tuples(st.just("end"), st.integers(0, 5)),
    st.tuples(st.just("look"), st.none()),
    st.tuples(st.just("evict"), st.integers(0, 30)),
    st.tuples(st.just("reset"), st.none()),
)


@settings(max_examples=cases(60), deadline=None)
@given(st.lists(actions, max_size=25))
def test_what_is_told_is_what_is_there(given_actions: list[tuple[str, Any]]) -> None:
    """Told bit by bit, or at once, it is what the block pool has."""
    scheduler, viewer = Recorded(num_blocks=20), source()
    for action, what in given_actions:
        if action in ("run", "begin"):
            if scheduler.num_free * BLOCK_SIZE < len(what) + BLOCK_SIZE:
                continue
            request = scheduler.request(what)
            scheduler.prefill(request)
            if action == "run":
                scheduler.free(request)
        elif action == "end" and scheduler.running:
            scheduler.free(scheduler.running[what % len(scheduler.running)])
        elif action == "evict":
            if not scheduler.kv_cache_manager.block_pool.blocks[what % 20].ref_cnt:
                scheduler.kv_cache_manager.evict_blocks({what % 20})
        elif action == "reset":
            scheduler.reset()
        elif action == "look":
            look(scheduler, viewer)
    look(scheduler, viewer)
    anew = source()
    look(scheduler, anew, name="another")
    cached = scheduler.cached()
    assert scheduler.feed.record.num_cached == len(cached)
    for each in (viewer, anew):
        told = {i: block.key for i, block in each.forest._at.items()}
        assert told.keys() == cached.keys()
        assert len(set(told.values())) == len({block.block_hash for block in cached.values()})
        assert sum(node["blocks"] for node in each.snapshot()["nodes"]) == len(set(told.values()))
    assert _by_keys(viewer) == _by_keys(anew)
    first, second = (min_used_s(each) for each in (viewer, anew))
    assert first >= second >= 1000.0
    memory = viewer.snapshot()["stats"]["memory_blocks"]
    total = memory.pop("total")
    assert sum(memory.values()) == total
    assert memory["cached"] == sum(block.ref_cnt == 0 for block in cached.values())


def min_used_s(viewer: Source) -> float:
    return min((node["last_used_s"] for node in viewer.snapshot()["nodes"]), default=1000.0)


def _by_keys(viewer: Source) -> dict[Any, Any]:
    forest, told = viewer.forest, {node["id"]: node for node in viewer.snapshot()["nodes"]}
    # when a block was used that something continued which has left is not known
    skipped = ("id", "parent", "text", "next_out", "last_used_s")
    return {
        tuple(block.key for block in node.blocks): (
            None if node.parent is None else node.parent.blocks[-1].key,
            {name: value for name, value in told[node.id].items() if name not in skipped},
        )
        for node in forest.nodes.values()
    }


def test_texts_come_only_if_somebody_reads_them() -> None:
    scheduler, viewer = Recorded(), source()
    scheduler.run([*range(8), 50])
    look(scheduler, viewer)
    look(scheduler, viewer)
    assert [node["text"] for node in viewer.snapshot()["nodes"]] == [None]
    look(scheduler, viewer, texts=True)
    [node] = viewer.snapshot()["nodes"]
    assert node["text"] == "0 1 2 3 4 5 6 7"


def test_a_prefix_has_its_tokens() -> None:
    scheduler, viewer = Recorded(), source()
    scheduler.run([*range(12), 50])
    scheduler.run([*range(8), 60, 61, 62, 63, 64])
    look(scheduler, viewer)
    leaf = max(viewer.snapshot()["nodes"], key=lambda node: node["id"])["id"]
    blocks = viewer.blocks_before(leaf)
    assert scheduler.feed.prefix(viewer.feed, blocks) in ([*range(12)], [*range(8), 60, 61, 62, 63])
    assert scheduler.feed.prefix("another", blocks) is None
    with pytest.raises(CommandError, match="begins with has left"):
        scheduler.feed.prefix(viewer.feed, blocks[1:])
    scheduler.reset()
    with pytest.raises(CommandError, match="has left the KV cache"):
        scheduler.feed.prefix(viewer.feed, blocks)


def test_what_has_a_salt_is_neither_read_nor_pinned_by_its_tokens() -> None:
    scheduler, viewer = Recorded(), source()
    scheduler.run([*range(9)], cache_salt="x")
    for _ in range(2):
        look(scheduler, viewer, texts=True)
    [node] = viewer.snapshot()["nodes"]
    assert (node["tokens"], node["text"]) == (8, "")
    with pytest.raises(CommandError, match="not of its tokens alone"):
        scheduler.feed.prefix(viewer.feed, viewer.blocks_before(node["id"]))


def test_only_what_nobody_uses_is_evicted() -> None:
    scheduler, viewer = Recorded(), source()
    scheduler.run([*range(12), 50])
    running = scheduler.request([*range(8), 60, 61, 62, 63, 64])
    scheduler.prefill(running)
    look(scheduler, viewer)
    nodes = viewer.snapshot()["nodes"]
    by_blocks = {
        node["blocks"]: node["id"] for node in nodes if node["running"] == 0 or node["blocks"] == 2
    }
    feed, evict = viewer.feed, scheduler.feed.evict
    with pytest.raises(CommandError, match="requests use 3 of these 4"):
        evict(feed, viewer.blocks_behind(by_blocks[2]))
    assert evict("another", viewer.blocks_behind(by_blocks[1])) is None
    assert evict(feed, viewer.blocks_behind(by_blocks[1])) == 1
    assert evict(feed, viewer.blocks_behind(by_blocks[1])) == 0
    scheduler.free(running)
    scheduler.pin("a", list(range(9)))
    look(scheduler, viewer)
    with pytest.raises(CommandError, match="2 of these 4 blocks are pinned"):
        evict(feed, viewer.blocks_behind(by_blocks[2]))
    scheduler.pins.unpin("a")
    assert evict(feed, viewer.blocks_behind(by_blocks[2])) == 4  # one twice
    look(scheduler, viewer)
    assert viewer.snapshot()["nodes"] == []


def test_nothing_is_collected_for_nobody() -> None:
    scheduler, viewer = Recorded(), source()
    scheduler.run([*range(8), 50])
    assert scheduler.feed.record.listeners == []
    look(scheduler, viewer)
    [listener] = scheduler.feed.record.listeners
    scheduler.run([*range(20, 28), 50])
    assert listener.changed
    scheduler.clock_s += FORGET_S + 1
    scheduler.run([*range(40, 48), 50])
    assert scheduler.feed.record.listeners == []
    kind, data = look(scheduler, viewer)
    assert kind == "snapshot" and len(data["nodes"]) == 3


def test_an_answer_that_did_not_come_is_told_anew() -> None:
    scheduler, viewer = Recorded(), source()
    scheduler.run([*range(8), 50])
    look(scheduler, viewer)
    scheduler.run([*range(20, 28), 50])
    scheduler.feed.poll("me", {viewer.feed: viewer.question(False)})  # lost on its way
    kind, data = look(scheduler, viewer)
    assert kind == "snapshot" and len(data["nodes"]) == 2


def test_too_many_watch() -> None:
    scheduler = Recorded()
    for number in range(MAX_WATCHERS):
        scheduler.feed.poll(str(number), {})
    with pytest.raises(CommandError, match="the most there are"):
        scheduler.feed.poll("one more", {})
    scheduler.clock_s += FORGET_S + 1
    scheduler.feed.poll("one more", {})


def test_much_is_told_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_relay.page.feed.MAX_BLOCKS", 3)
    scheduler, viewer = Recorded(), source()
    scheduler.run([*range(32), 50])
    first = scheduler.feed.poll("me", {})
    assert first["is_full"] and first["more"] and len(list(unpack(first["blocks"]))) == 3
    viewer.take(first)
    while (answer := scheduler.feed.poll("me", {viewer.feed: viewer.question(False)}))["more"]:
        viewer.take(answer)
    viewer.take(answer)
    assert shape(viewer)[-1][1] == sum(blocks for _, blocks, _ in shape(viewer)) == 8


def test_counts_of_steps() -> None:
    scheduler, viewer = Recorded(), source()
    look(scheduler, viewer)
    for _ in range(2):
        scheduler.feed.on_step(SimpleNamespace(kv_tokens_read=30, kv_tokens_logical=50))
    _, data = look(scheduler, viewer)
    assert (data["stats"]["kv_tokens_read"], data["stats"]["kv_tokens_logical"]) == (60, 100)


@pytest.mark.skipif(not HAS_LOOKAHEAD_HASHES, reason="this vLLM has no such hashes")
def test_hashes_that_cover_what_comes_behind() -> None:
    scheduler, viewer = Recorded(lookahead_tokens=1), source()
    scheduler.run([*range(13)])
    look(scheduler, viewer)
    assert shape(viewer) == [(None, 3, 0)]


def test_modules_are_roots_with_names() -> None:
    """Each once, whichever prompts it is in; what follows them continues the last one."""
    scheduler, viewer = Recorded(), source()
    hasher = module_block_hasher(get_request_block_hasher(BLOCK_SIZE, sha256), BLOCK_SIZE, sha256)
    both = (Segment("a", 6, ((0, 0),)), Segment("b", 4, ((0, 6),)))
    for segments in (both, both[:1]):
        plan = ModulePlan(BLOCK_SIZE, segments, (TailRun(5, 20, ((0, 6),)),))
        tokens = [*range(8), *range(10, 14)][: plan.num_stored_slots] + [*range(50, 55)]
        params = SamplingParams(max_tokens=1, extra_args={EXTRA_ARG: plan.to_argument()})
        request = Request(
            request_id=str(len(segments)),
            prompt_token_ids=tokens,
            sampling_params=params,
            pooling_params=None,
            block_hasher=hasher,
        )
        scheduler.prefill(request)
        look(scheduler, viewer)
        nodes = viewer.snapshot()["nodes"]
        assert all(node["running"] == 1 for node in nodes if node["module"] in ("a", "b")) or (
            segments != both
        )
        scheduler.free(request)
    look(scheduler, viewer)
    nodes = {node["id"]: node for node in viewer.snapshot()["nodes"]}
    roots = {node["module"]: node["blocks"] for node in nodes.values() if node["parent"] is None}
    assert roots == {"a": 2, "b": 1}
    # what sees the same modules is the same, and found under one of them
    parents = {nodes[node["parent"]]["module"] for node in nodes.values() if node["parent"]}
    assert parents == {"b"}
    assert viewer.snapshot()["stats"]["memory_blocks"]["modules"] == 3
    [leaf, *_] = [node["id"] for node in nodes.values() if node["parent"]]
    with pytest.raises(CommandError, match="not of its tokens alone"):
        scheduler.feed.prefix(viewer.feed, viewer.blocks_before(leaf))
