# SPDX-License-Identifier: Apache-2.0
"""Which replica holds which blocks, as they tell."""

from __future__ import annotations

from itertools import product
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.cluster.kv_event_cases import Event, NaiveEngine
from vllm_relay.cluster.replica_index import ReplicaIndex, chain_of
from vllm_relay.cluster.told_caches import ToldCaches

SIZE = 2
REPLICAS = 2
PROMPTS = [list(each) for each in product((7, 8), repeat=3 * SIZE)]
LONG_PROMPTS = [[*each, *[9] * SIZE * 17] for each in PROMPTS[:3]]
prompts = st.sampled_from(PROMPTS + LONG_PROMPTS).flatmap(
    lambda tokens: st.integers(0, len(tokens)).map(lambda end: tokens[:end])
)
changes = st.tuples(
    st.sampled_from(["store"] * 4 + ["evict"] * 3 + ["clear"]),
    st.integers(0, REPLICAS - 1),
    prompts,
    st.integers(0, 60),
)


def tell(caches: ToldCaches, replica: int, event: Event) -> None:
    what, *arguments = event
    if what == "cleared":
        caches.clear(replica)
    else:
        getattr(caches, what)(replica, *arguments)


def num_held(caches: ReplicaIndex, replica: int, tokens: list[int]) -> int:
    """Blocks of a prompt that the index knows."""
    [depth] = [
        depth for depth, bits in caches.held.ends(chain_of(tokens, SIZE)) if bits >> replica & 1
    ]
    return depth


def apply(engine: NaiveEngine, change: Any) -> None:
    what, _, tokens, number = change
    if what == "store":
        # what is there is computed again where two do so at the same time
        engine.store(tokens, min(number % 3, engine.num_held(tokens)))
    elif what == "evict":
        engine.evict(number)
    else:
        engine.clear()


@given(st.lists(changes, max_size=40))
def test_what_is_told_is_what_the_engines_hold(steps: list[Any]) -> None:
    engines = [NaiveEngine(seed, SIZE) for seed in range(REPLICAS)]
    caches = ToldCaches([1000] * REPLICAS, SIZE)
    for step in steps:
        engine = engines[step[1]]
        begin = len(engine.events)
        apply(engine, step)
        for event in engine.events[begin:]:
            tell(caches, step[1], event)
    for replica, engine in enumerate(engines):
        asked = PROMPTS + LONG_PROMPTS
        assert [num_held(caches, replica, each) for each in asked] == [
            engine.num_held(each) for each in asked
        ]
    assert len(caches.held) == len(set().union(*(+each.blocks for each in engines)))


@given(st.lists(changes, max_size=40), st.integers(0, 40))
def test_who_hears_late_knows_nothing_that_is_not_so(steps: list[Any], missed: int) -> None:
    engine = NaiveEngine(1, SIZE)
    caches = ToldCaches([1000], SIZE)
    for step in steps:
        apply(engine, step)
    for event in engine.events[:missed]:
        tell(caches, 0, event)
    caches.forget(0)
    assert not len(caches.held)
    for event in engine.events[missed + 3 :]:
        tell(caches, 0, event)
    assert all(num_held(caches, 0, each) <= engine.num_held(each) for each in PROMPTS)


def test_a_chain_ends_where_its_first_block_is_missing() -> None:
    engine, caches = NaiveEngine(1, SIZE), ToldCaches([99], SIZE)
    tokens = LONG_PROMPTS[0]
    engine.store(tokens, 0)
    tell(caches, 0, engine.events[0])
    for blocks in reversed(range(20)):
        tell(caches, 0, ("removed", [engine.name(tokens[: (blocks + 1) * SIZE])]))
        assert num_held(caches, 0, tokens) == blocks
        engine.store(tokens[: (blocks + 1) * SIZE], blocks)
        tell(caches, 0, engine.events[-1])


def test_what_was_sent_is_expected_until_it_is_told() -> None:
    engine, caches = NaiveEngine(1, SIZE), ToldCaches([4], SIZE)
    tokens = PROMPTS[5]
    caches.sent(0, chain_of(tokens, SIZE))
    assert num_held(caches, 0, tokens) == 3
    engine.store(tokens[:4], 0)
    engine.evict(1)
    for event in engine.events:
        tell(caches, 0, event)
    assert num_held(caches, 0, tokens) == 1, "what is told counts more"
    caches.forget(0)
    assert num_held(caches, 0, tokens) == 0
    assert len(caches.held) == 1, "the last block is on its way yet"
    caches.clear(0)
    assert not len(caches.held)


def test_what_is_told_again_after_it_was_sent_is_no_copy() -> None:
    engine, caches = NaiveEngine(1, SIZE), ToldCaches([9], SIZE)
    engine.store(PROMPTS[0], 0)
    tell(caches, 0, engine.events[0])
    caches.sent(0, chain_of(PROMPTS[0], SIZE))
    tell(caches, 0, ("removed", [engine.name(PROMPTS[0])]))
    assert num_held(caches, 0, PROMPTS[0]) == 2


def test_a_block_may_have_several_names() -> None:
    """As with EAGLE, whose names depend on the tokens after a block."""
    caches = ToldCaches([9], SIZE)
    caches.stored(0, [11], None, [7, 7])
    caches.stored(0, [12], None, [7, 7])
    caches.stored(0, [13], 12, [8, 8])
    caches.removed(0, [11])
    assert num_held(caches, 0, [7, 7, 8, 8]) == 2
    caches.removed(0, [12])
    assert num_held(caches, 0, [7, 7, 8, 8]) == 0


def test_names_are_bytes_or_numbers() -> None:
    caches = ToldCaches([9], SIZE)
    names = [bytes([number]) * 32 for number in (1, 2)]
    caches.stored(0, names, None, [7, 7, 8, 8])
    caches.removed(0, names[1:])
    assert num_held(caches, 0, [7, 7, 8, 8]) == 1


def test_more_than_a_cache_has_was_not_all_heard() -> None:
    caches = ToldCaches([3, 3], SIZE)
    for replica in range(2):
        caches.stored(replica, [1, 2, 3], None, PROMPTS[0])
    caches.stored(0, [4], None, [8, 8])
    assert num_held(caches, 0, PROMPTS[0]) == num_held(caches, 0, [8, 8]) == 0
    assert num_held(caches, 1, PROMPTS[0]) == 3
    for name in range(1000):
        caches.stored(1, [name], None, [name, 0])
        assert len(caches.held) <= 3


def test_blocks_of_another_size_are_left_out() -> None:
    caches = ToldCaches([9], SIZE)
    caches.stored(0, [1], None, [7])
    caches.stored(0, [1, 2], None, [7, 7])
    assert not len(caches.held)


def told_of(sent_to: list[int], told_by: list[int]) -> list[int | None]:
    """For whom replicas are taken, where each prompt is sent to one and told by one."""
    engines = [NaiveEngine(seed, SIZE) for seed in range(3)]
    caches = ToldCaches([1000] * 3, SIZE)
    begin = [1] * 2 * SIZE
    for number, (sent, told) in enumerate(zip(sent_to, told_by, strict=True)):
        tokens = [*begin, *[number + 2] * SIZE * 2]
        caches.sent(sent, chain_of(tokens, SIZE))
        engine = engines[told]
        engine.store(tokens, engine.num_held(tokens))
        tell(caches, told, engine.events[-1])
    return [caches.taken_for(replica) for replica in range(3)]


def test_who_tells_of_what_another_one_was_sent() -> None:
    rounds = 40
    assert told_of([0, 1, 2] * rounds, [0, 1, 2] * rounds) == [None] * 3
    assert told_of([0, 1, 2] * rounds, [1, 0, 2] * rounds) == [1, 0, None]
    assert told_of([0, 1, 2] * rounds, [1, 2, 0] * rounds) == [2, 0, 1]
    assert told_of([0, 1, 2] * 3, [1, 2, 0] * 3) == [None] * 3, "not enough"
    # another program sends the same prompts elsewhere
    assert told_of([0, 1] * rounds, [0, 0] * rounds) == [None] * 3
    assert told_of([0, 1, 1, 2] * rounds, [0, 0, 0, 2] * rounds) == [None] * 3


@given(st.lists(changes, max_size=40))
def test_prompts_of_others_say_nothing(steps: list[Any]) -> None:
    engines = [NaiveEngine(seed, SIZE) for seed in range(REPLICAS)]
    caches = ToldCaches([1000] * REPLICAS, SIZE)
    for step in steps * 4:
        apply(engines[step[1]], step)
        for event in engines[step[1]].events[-1:]:
            tell(caches, step[1], event)
    assert [caches.taken_for(replica) for replica in range(REPLICAS)] == [None] * REPLICAS
