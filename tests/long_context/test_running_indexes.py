# SPDX-License-Identifier: Apache-2.0
"""Indexes that threads build for running requests: taken when they are ready, or dropped."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.long_context.made_costs import made_costs
from vllm_relay.long_context import host_sequence, running_indexes
from vllm_relay.long_context.host_attention import HostPart, Retrieval, attend_retrieved
from vllm_relay.long_context.host_sequence import HostLayer, HostSequence, Segment, as_elements_of
from vllm_relay.long_context.running_indexes import RunningIndexes
from vllm_relay.long_context.window import Residency
from vllm_relay.sparse.attention import SparseLayer
from vllm_relay.sparse.coarse import CoarseIndex
from vllm_relay.sparse.index_choice import build_index
from vllm_relay.sparse.options import DBOptions
from vllm_relay.sparse.query_types import Dipr, QueryType
from vllm_relay.sparse.retrieval import SessionStats

KV_HEADS, GROUP, HEAD_SIZE = 2, 2, 32
GRANULE_TOKENS, LARGE_TOKENS = 64, 512
SINK_END, NUM_TOKENS = 32, 700
SCALE = HEAD_SIZE**-0.5
QUERY = Dipr(alpha=0.01, scale=SCALE)
COSTS = made_costs()
MANY = 10**6


@pytest.fixture(autouse=True)
def small_indexes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_sequence, "GRANULE_TOKENS", GRANULE_TOKENS)


@pytest.fixture(params=[1, 2], ids=["one_thread", "two_threads"])
def builders(request: pytest.FixtureRequest) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(request.param) as pool:
        yield pool


def states(num_tokens: int, num_heads: int, seed: int) -> torch.Tensor:
    """[tokens, heads, size] around a few centres."""
    generator = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(8, HEAD_SIZE, generator=torch.Generator().manual_seed(1))
    chosen = torch.randint(0, 8, (num_tokens, num_heads), generator=generator)
    return centres[chosen] + torch.randn(num_tokens, num_heads, HEAD_SIZE, generator=generator)


def sequence_of(
    num_layers: int = 2, seed: int = 0, dtype: torch.dtype = torch.float32
) -> HostSequence:
    """A request whose prompt was computed, and that was searched once."""
    sequence = HostSequence(0, NUM_TOKENS + 2000)
    for number in range(num_layers):
        keys, values = (states(NUM_TOKENS, KV_HEADS, seed + 10 * number + i) for i in (0, 1))
        layer = sequence.layer(f"layer {number}", keys.to(dtype))
        layer.write(0, keys.to(dtype), values.to(dtype))
        query = states(NUM_TOKENS, KV_HEADS * GROUP, seed + 10 * number + 2).to(dtype)
        grouped = query.unflatten(1, (KV_HEADS, -1)).permute(1, 2, 0, 3)
        layer.train_queries.add(grouped, first_position=0)
        layer.query = QUERY
        layer.index_up_to(SINK_END, NUM_TOKENS - 40)
    return sequence


def running_of(builders: ThreadPoolExecutor, **costs: float) -> RunningIndexes:
    return RunningIndexes(made_costs(**costs), lambda: builders)


def wait_for(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end_s, "it did not happen"
        time.sleep(0.001)


def follow_until_taken(running: RunningIndexes, name: str, sequence: HostSequence) -> None:
    def all_are_taken() -> bool:
        running.follow(name, sequence, MANY)
        return all(layer.better is not None for layer in sequence.layers.values())

    wait_for(all_are_taken)
    for layer in sequence.layers.values():
        layer.index_up_to(SINK_END, NUM_TOKENS - 40)


class Gate:
    """Stands for `build_index`, and lets builds through when it is open."""

    def __init__(self) -> None:
        self.opened, self.lock = threading.Event(), threading.Lock()
        self.calls = self.running = self.most_at_once = 0

    def __call__(self, *args: Any) -> Any:
        with self.lock:
            self.calls += 1
            self.running += 1
            self.most_at_once = max(self.most_at_once, self.running)
        assert self.opened.wait(30)
        try:
            return build_index(*args)
        finally:
            with self.lock:
                self.running -= 1


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate()
    monkeypatch.setattr(running_indexes, "build_index", made)
    yield made
    made.opened.set()


def attend(layer: HostLayer, seed: int = 5) -> tuple[torch.Tensor, SessionStats]:
    part = HostPart(layer, None, 0, Residency(SINK_END, NUM_TOKENS - 40), NUM_TOKENS, SINK_END)
    stats = SessionStats()
    query = states(1, KV_HEADS * GROUP, seed).to(layer.keys.dtype)
    output, lse = torch.zeros_like(query), torch.full(query.shape[:2], -torch.inf)
    attend_retrieved([part], [0], query, output, lse, Retrieval(QUERY, DBOptions(), SCALE), stats)
    return torch.cat([output.flatten(), lse.flatten()]), stats


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_request_is_searched_with_the_index_that_was_built(
    builders: ThreadPoolExecutor, dtype: torch.dtype
) -> None:
    """As if that had been built with the same queries in the step itself."""
    sequence, expected = sequence_of(dtype=dtype), sequence_of(dtype=dtype)
    follow_until_taken(running_of(builders), "a", sequence)
    for name, layer in expected.layers.items():
        scanned, scan = attend(layer)
        keys, values = layer.rows(SINK_END, SINK_END + LARGE_TOKENS)
        parts, last = (
            layer.train_queries.parts_before(SINK_END + LARGE_TOKENS),
            (layer.train_queries.last()),
        )
        assert last is not None
        indexes: list[CoarseIndex] = []
        queries: list[QueryType | None] = []
        for head in range(KV_HEADS):
            index, plan = build_index(
                0, as_elements_of(keys[head]), as_elements_of(values[head]),
                as_elements_of(torch.cat(parts, 1)[head]), GROUP,
                DBOptions(query=Dipr(alpha=QUERY.alpha), threads=1), COSTS,
                last[head].float().numpy(),
            )  # fmt: skip
            assert plan is not None
            planned = plan.query_for(LARGE_TOKENS)
            assert isinstance(index, CoarseIndex) and planned is not None
            assert planned.width is not None
            indexes.append(index)
            queries.append(replace(QUERY, width=planned.width))
        layer.better = Segment(
            SINK_END, SINK_END + LARGE_TOKENS,
            SparseLayer(indexes, [as_elements_of(head) for head in values]), queries,
        )  # fmt: skip
        found, search = attend(sequence.layers[name])
        assert sequence.layers[name].segments[0].queries == queries
        assert torch.equal(found, attend(layer)[0])
        # not as if nothing had been built
        assert search.distances < scan.distances
        assert float((found - scanned).abs().max()) < 0.1


def test_the_scan_goes_on_until_the_index_is_ready(
    builders: ThreadPoolExecutor, gate: Gate
) -> None:
    sequence, running = sequence_of(), running_of(builders)
    layer = sequence.layers["layer 0"]
    before, flat = attend(layer)[0], layer.segments[0]
    assert running.num_queued == 0
    assert running.follow("a", sequence, MANY)
    for _ in range(20):
        assert running.follow("a", sequence, MANY)
        assert torch.equal(attend(layer)[0], before) and layer.segments[0] is flat
    assert running.num_queued == 1
    gate.opened.set()
    follow_until_taken(running, "a", sequence)
    wait_for(lambda: running.num_queued == 0)
    assert gate.calls == KV_HEADS * len(sequence.layers)
    assert [(each.begin, each.end) for each in layer.segments] == [(32, 544), (544, 608)]
    old = weakref.ref(flat)
    del flat
    gc.collect()
    assert old() is None, "the codes of the scan are still there"


def test_nothing_is_built_before_scans_have_cost_as_much(
    builders: ThreadPoolExecutor, gate: Gate
) -> None:
    scan_s = 1e-9 * 1e5 * LARGE_TOKENS
    sequence = sequence_of()
    running = running_of(builders, build_us=1e6 * 9.5 * scan_s / LARGE_TOKENS)
    begun = [running.follow("a", sequence, MANY) for _ in range(12)]
    assert begun.index(True) == 9 and sum(begun) == 3
    for max_tokens in (18, 19):
        one = sequence_of(seed=50)
        begun = [running.follow(str(max_tokens), one, max_tokens - i) for i in range(max_tokens)]
        assert any(begun) == (max_tokens == 19)


def test_a_layer_whose_turn_comes_too_late_is_left_out(
    builders: ThreadPoolExecutor, gate: Gate
) -> None:
    sequence = sequence_of(num_layers=3)
    running = running_of(builders, build_us=1e3)  # of 20 tokens
    while not running.follow("a", sequence, MANY):
        pass
    wait_for(lambda: gate.calls == 1)
    running.follow("a", sequence, 5)
    gate.opened.set()
    wait_for(lambda: running.num_queued == 0)
    running.follow("a", sequence, 4)
    assert gate.calls == KV_HEADS  # of the layer that was begun
    taken = [layer.better is not None for layer in sequence.layers.values()]
    assert taken == [True, False, False]


def test_requests_wait_for_a_builder(builders: ThreadPoolExecutor, gate: Gate) -> None:
    running = running_of(builders)
    sequences = {name: sequence_of(seed=i) for i, name in enumerate("abcd")}
    for name, sequence in sequences.items():
        running.follow(name, sequence, MANY)
    assert running.num_queued == 4
    wait_for(lambda: gate.running == builders._max_workers)
    gate.opened.set()
    for name, sequence in sequences.items():
        follow_until_taken(running, name, sequence)
    assert gate.most_at_once == builders._max_workers
    for seed, sequence in enumerate(sequences.values()):
        segment = sequence.layers["layer 1"].segments[0]
        keys = sequence_of(seed=seed).layers["layer 1"].rows(segment.begin, segment.end)[0]
        for head, index in enumerate(segment.layer.indexes):
            np.testing.assert_array_equal(index.keys.to_float32(), keys[head].numpy())


def test_a_request_that_ended_is_dropped(builders: ThreadPoolExecutor, gate: Gate) -> None:
    """Also one that still waits, whose memory is free at once."""
    running = running_of(builders)
    sequences = {name: sequence_of(seed=i) for i, name in enumerate("abcd")}
    for name, sequence in sequences.items():
        running.follow(name, sequence, MANY)
    wait_for(lambda: gate.running == builders._max_workers)
    for name in sequences:
        running.discard(name)
    assert running.num_queued == 0
    layers = [sequences[name].layers["layer 0"] for name in ("a", "d")]
    begun, waiting = (weakref.ref(layer) for layer in layers)
    del layers, sequence
    sequences.clear()
    gc.collect()
    assert waiting() is None
    assert begun() is not None  # a builder reads it
    calls = gate.calls
    gate.opened.set()
    wait_for(lambda: gate.running == 0 and begun() is None)
    assert gate.calls == calls


def test_what_was_built_for_a_request_that_ended_is_not_taken(
    builders: ThreadPoolExecutor, gate: Gate
) -> None:
    sequence, running = sequence_of(), running_of(builders)
    running.follow("a", sequence, MANY)
    wait_for(lambda: gate.calls == 1)
    build = running._followed["a"].build
    assert build is not None
    running.close()
    gate.opened.set()
    wait_for(lambda: gate.running == 0)
    assert build.done is not None
    wait_for(build.done.done)
    build.take_ready()
    assert all(layer.better is None for layer in sequence.layers.values())


def test_a_request_that_begins_again_is_built_again(
    builders: ThreadPoolExecutor, gate: Gate
) -> None:
    old, new, running = sequence_of(), sequence_of(seed=70), running_of(builders)
    running.follow("a", old, MANY)
    wait_for(lambda: gate.calls == 1)
    running.follow("a", new, MANY)
    gate.opened.set()
    follow_until_taken(running, "a", new)
    assert all(layer.better is None for layer in old.layers.values())


@pytest.mark.parametrize("when", ["built", "ready", "taken"])
def test_tokens_that_are_written_again_lose_their_index(
    builders: ThreadPoolExecutor, gate: Gate, when: str
) -> None:
    sequence, running = sequence_of(num_layers=1), running_of(builders)
    (layer,) = sequence.layers.values()
    running.follow("a", sequence, MANY)
    wait_for(lambda: gate.calls == 1)
    if when != "built":
        gate.opened.set()
        wait_for(lambda: running.num_queued == 0)
    if when == "taken":
        running.follow("a", sequence, MANY)
        assert layer.better is not None
    keys, values = states(600, KV_HEADS, 80), states(600, KV_HEADS, 81)
    layer.write(100, keys, values)
    gate.opened.set()
    wait_for(lambda: running.num_queued == 0)
    running.follow("a", sequence, MANY)
    assert layer.better is None
    again = sequence_of(num_layers=1).layers["layer 0"]
    again.write(100, keys, values)
    assert torch.equal(attend(layer)[0], attend(again)[0])


def test_later_tokens_that_are_written_again_do_not_matter(
    builders: ThreadPoolExecutor, gate: Gate
) -> None:
    sequence, running = sequence_of(num_layers=1), running_of(builders)
    running.follow("a", sequence, MANY)
    (layer,) = sequence.layers.values()
    layer.write(NUM_TOKENS - 1, *(part[:, -1:].transpose(0, 1) for part in layer.rows(0, 700)))
    gate.opened.set()
    follow_until_taken(running, "a", sequence)


def test_a_build_that_fails_leaves_the_scan(
    builders: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def fails(*args: Any) -> Any:
        raise MemoryError("no more")

    monkeypatch.setattr(running_indexes, "build_index", fails)
    sequence, running = sequence_of(), running_of(builders)
    before = attend(sequence.layers["layer 0"])[0]
    with caplog.at_level(logging.ERROR):
        running.follow("a", sequence, MANY)
        wait_for(lambda: running.num_queued == 0)
    running.follow("a", sequence, MANY)
    assert torch.equal(attend(sequence.layers["layer 0"])[0], before)
    assert len([each for each in caplog.records if "flat indexes" in each.message]) == 2


def test_without_queries_nothing_is_built(builders: ThreadPoolExecutor, gate: Gate) -> None:
    sequence, running = sequence_of(), running_of(builders)
    for layer in sequence.layers.values():
        layer.query = None
    assert not any(running.follow("a", sequence, MANY) for _ in range(5))
    short = HostSequence(0, 500)
    assert not running.follow("short", short, MANY)


def test_tokens_that_follow_are_indexed_behind_it(builders: ThreadPoolExecutor) -> None:
    sequence, running = sequence_of(num_layers=1), running_of(builders)
    follow_until_taken(running, "a", sequence)
    (layer,) = sequence.layers.values()
    better = layer.better
    layer.write(NUM_TOKENS, states(1500, KV_HEADS, 3), states(1500, KV_HEADS, 4))
    for end in range(NUM_TOKENS, NUM_TOKENS + 1500, 37):
        indexed = layer.index_up_to(SINK_END, end)
        assert end - GRANULE_TOKENS < indexed <= end
        assert layer.segments[0] is better and len(layer.segments) <= 3
        ends = [SINK_END, *(segment.end for segment in layer.segments)]
        assert [segment.begin for segment in layer.segments] == ends[:-1] and ends[-1] == indexed
    layer.forget_indexes()
    layer.index_up_to(SINK_END, NUM_TOKENS + 1500)
    assert len(layer.segments) == 2 and layer.segments[0].queries is None
