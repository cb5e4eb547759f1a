# SPDX-License-Identifier: Apache-2.0
"""Every eviction of random traces through vLLM's block pool equals that of a brute-force oracle."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core import block_pool

from tests.prefix_cache.eviction.block_pool_traces import (
    NUM_BLOCKS,
    Cache,
    admissions,
    path_of,
    steps,
)
from tests.prefix_cache.eviction.eviction_oracles import (
    CheckedQueue,
    NeededOracle,
    UsedOracle,
    leaving_order,
)
from tests.support.depth import cases
from vllm_relay.prefix_cache.eviction.free_queue import PolicyFreeQueue, make_free_queue
from vllm_relay.prefix_cache.eviction.reuse import Reuse


def no_room():
    """Keeps no block for its uses."""
    reuse = Reuse(0)
    assert not reuse.room_blocks
    return reuse


@pytest.mark.parametrize("cache_late", [False, True])
@pytest.mark.parametrize(
    ("oracle", "traces", "make_reuse"),
    [(NeededOracle, steps, no_room), (UsedOracle, admissions, lambda: Reuse(NUM_BLOCKS))],
)
def test_evicts_what_the_oracle_evicts(oracle, traces, make_reuse, cache_late):
    num_evicted = 0

    @settings(max_examples=cases(38))
    @given(traces, st.integers(0, NUM_BLOCKS))
    def check(steps, room_blocks):
        nonlocal num_evicted
        reuse = make_reuse()
        if oracle is UsedOracle:
            reuse._room_blocks = float(room_blocks)
        cache = Cache(lambda blocks, next_use: CheckedQueue(blocks, next_use, reuse, oracle))
        for step in steps:
            cache.do(step, cache_late)
        while cache.running:
            cache.finish(0)
        assert cache.pool.free_block_queue.num_free_blocks == NUM_BLOCKS - 1
        cache.pool.get_new_blocks(NUM_BLOCKS - 1)
        num_evicted += cache.pool.free_block_queue.num_evicted

    check()
    assert num_evicted > cases(250)


def make_free_queue_of(name):
    return lambda blocks, next_use: make_free_queue(name, next_use)(blocks)


def blocks_in_order(cache):
    return [block.block_id for block in leaving_order(cache.pool.free_block_queue)]


STOCK_QUEUE = block_pool.FreeKVCacheBlockQueue


@settings(max_examples=cases(75))
@given(admissions)
def test_without_requests_that_wait_and_room_for_others_it_takes_the_same_blocks_as_vllm(steps):
    stock = Cache(lambda blocks, next_use: STOCK_QUEUE(blocks))
    ours = Cache(lambda blocks, next_use: PolicyFreeQueue(blocks, next_use, no_room()))
    for step in steps:
        stock.do(step, cache_late=False)
        ours.do(step, cache_late=False)
        assert stock.taken == ours.taken
        assert blocks_in_order(stock) == blocks_in_order(ours)


@settings(max_examples=cases(25))
@given(steps)
def test_lru_takes_the_same_blocks_as_vllm(steps):
    stock = Cache(lambda blocks, next_use: STOCK_QUEUE(blocks))
    ours = Cache(make_free_queue_of("lru"))
    for step in steps:
        stock.do(step, cache_late=True)
        ours.do(step, cache_late=True)
        assert stock.taken == ours.taken
        assert blocks_in_order(stock) == blocks_in_order(ours)


@pytest.mark.parametrize("cache_late", [False, True])
def test_children_leave_before_their_parents(cache_late):
    """In whatever order requests end, and whoever waits for their blocks."""

    @settings(max_examples=cases(38))
    @given(steps, st.randoms())
    def check(steps, random):
        cache = Cache(make_free_queue_of("queue"))
        for step in steps:
            cache.do(step, cache_late)
        while cache.running:
            cache.finish(random.randrange(9))
        gone, copies = [], Counter()
        free = [
            path_of(block.block_hash)
            for block in leaving_order(cache.pool.free_block_queue)
            if block.block_hash is not None
        ]
        copies.update(free)
        for path in free:
            copies[path] -= 1
            assert not any(path.startswith(parent) for parent in gone)
            if not copies[path]:
                gone.append(path)

    check()


@settings(max_examples=cases(75))
@given(steps, st.integers(0, 2 * NUM_BLOCKS))
def test_the_order_is_told_whoever_waits_and_whatever_was_used(steps, room_blocks):
    def make_queue(blocks, next_use):
        reuse = Reuse(NUM_BLOCKS)
        reuse._room_blocks = float(room_blocks)
        return PolicyFreeQueue(blocks, next_use, reuse)

    cache = Cache(make_queue)
    queue = cache.pool.free_block_queue
    for step in steps:
        cache.do(step, cache_late=False)
    in_order = leaving_order(queue)
    assert len(in_order) == queue.num_free_blocks
    is_needed = [
        block.block_hash is not None and cache.next_use.next_use(block.block_hash) is not None
        for block in in_order
    ]
    assert is_needed == sorted(is_needed)
    while in_order:
        number = min(len(in_order), 2)
        assert queue.popleft_n(number) == in_order[:number]
        in_order = in_order[number:]
        assert leaving_order(queue) == in_order


class Tree:
    """Caches whole prefixes and says in which order they leave."""

    def __init__(self, name):
        self.cache = Cache(make_free_queue_of(name))

    def run(self, *paths):
        for path in paths:
            self.cache.admit(bytes(path), 0, False)
            self.cache.finish(0)
        return self

    def order(self):
        free = leaving_order(self.cache.pool.free_block_queue)
        return [list(path_of(block.block_hash)) for block in free if block.block_hash]


def test_what_was_used_twice_stays_while_there_is_room():
    tree = Tree("queue").run([1], [2], [1], [2])
    reuse = tree.cache.pool.free_block_queue._reuse
    reuse._room_blocks = 1.0
    for path in range(10, 50):
        tree.run([path, path])
    assert [2] in tree.order() and [1] not in tree.order()


def test_there_is_more_room_when_what_was_used_twice_comes_back():
    tree = Tree("queue")
    reuse = tree.cache.pool.free_block_queue._reuse
    room_blocks = []
    for number in range(6):  # it has left when it comes back, as long as there is no room
        tree.run([0, 1, 2], *([20 * number + each] for each in range(10, 22)))
        room_blocks.append(reuse.room_blocks)
    assert room_blocks[0] < 3 < room_blocks[-1]
    assert tree.order()[-3:] == [[0, 1, 2], [0, 1], [0]]


def test_queue_keeps_what_is_needed_soonest():
    tree = Tree("queue").run([1, 1], [2], [3], [4])
    tree.cache.wait(5, [1, 1])
    tree.cache.wait(6, [2])
    assert tree.order() == [[3], [4], [2], [1, 1], [1]]
    tree.cache.wait(3, [2])
    assert tree.order() == [[3], [4], [1, 1], [1], [2]]
    tree.cache.wait(5, [])
    assert tree.order() == [[1, 1], [1], [3], [4], [2]]
