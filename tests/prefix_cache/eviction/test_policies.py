# SPDX-License-Identifier: Apache-2.0
"""Every eviction of random traces through vLLM's block pool equals that of a brute-force oracle."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core import block_pool

from tests.prefix_cache.eviction.block_pool_traces import NUM_BLOCKS, Cache, path_of, steps
from tests.prefix_cache.eviction.eviction_oracles import ORACLES, CheckedQueue
from tests.support.depth import cases
from vllm_relay.prefix_cache.eviction.free_queue import PolicyFreeQueue, make_free_queue
from vllm_relay.prefix_cache.eviction.policies import EvictionPolicy, Gdsf, make_policy


class Lru(EvictionPolicy):
    """vLLM's own order, which `PolicyFreeQueue` has to keep too."""

    def worth(self, key):
        return None


@pytest.mark.parametrize(
    ("name", "cache_late"),
    [("queue", False), ("queue", True), ("gdsf", False)],
)
def test_evicts_what_the_oracle_evicts(name, cache_late):
    num_evicted = 0

    @settings(max_examples=cases(38))
    @given(steps)
    def check(steps):
        nonlocal num_evicted
        cache = Cache(
            lambda blocks, next_use: CheckedQueue(
                blocks, make_policy(name, next_use, NUM_BLOCKS), next_use, ORACLES[name](next_use)
            )
        )
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
    return [block.block_id for block in cache.pool.free_block_queue.get_all_free_blocks()]


STOCK_QUEUE = block_pool.FreeKVCacheBlockQueue


@settings(max_examples=cases(75))
@given(steps)
def test_a_policy_with_the_order_of_vllm_takes_the_same_blocks(steps):
    stock = Cache(lambda blocks, next_use: STOCK_QUEUE(blocks))
    ours = Cache(lambda blocks, next_use: PolicyFreeQueue(blocks, Lru(), next_use))
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


@pytest.mark.parametrize(
    ("name", "cache_late"), [("queue", False), ("queue", True), ("gdsf", False)]
)
def test_children_leave_before_their_parents(name, cache_late):
    """In whatever order requests end, and whoever waits for their blocks."""

    @settings(max_examples=cases(38))
    @given(steps, st.randoms())
    def check(steps, random):
        cache = Cache(make_free_queue_of(name))
        for step in steps:
            cache.do(step, cache_late)
        while cache.running:
            cache.finish(random.randrange(9))
        gone, copies = [], Counter()
        free = [
            path_of(block.block_hash)
            for block in cache.pool.free_block_queue.get_all_free_blocks()
            if block.block_hash is not None
        ]
        copies.update(free)
        for path in free:
            copies[path] -= 1
            assert not any(path.startswith(parent) for parent in gone)
            if not copies[path]:
                gone.append(path)

    check()


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
        free = self.cache.pool.free_block_queue.get_all_free_blocks()
        return [list(path_of(block.block_hash)) for block in free if block.block_hash]


def test_gdsf_keeps_what_is_used_often_and_ages_it():
    tree = Tree("gdsf").run([1], [1], [1], [2], [3])
    assert tree.order() == [[2], [3], [1]]
    for path in range(10, 60):
        tree.run([path, path])
    assert [1] not in tree.order()


def test_gdsf_counts_admissions():
    tree = Tree("gdsf").run([1], [2], [2])
    for position in range(5):
        tree.cache.wait(position, [1])
        tree.cache.wait(position, [1])
    assert tree.order() == [[1], [2]]
    tree.run([1], [1])
    assert tree.order() == [[2], [1]]


def test_gdsf_knows_the_uses_of_few_blocks():
    policy = Gdsf(max_keys=3)
    policy.on_use([b"a", b"b", b"a"])
    assert policy.worth(b"a") == (2,)
    policy.on_use([b"c", b"d"])
    assert len(policy._uses) == 3
    assert policy.worth(b"b") == (1,) and policy.worth(b"a") == (1,)


def test_queue_keeps_what_is_needed_soonest():
    tree = Tree("queue").run([1, 1], [2], [3], [4])
    tree.cache.wait(5, [1, 1])
    tree.cache.wait(6, [2])
    assert tree.order() == [[3], [4], [2], [1, 1], [1]]
    tree.cache.wait(3, [2])
    assert tree.order() == [[3], [4], [1, 1], [1], [2]]
    tree.cache.wait(5, [])
    assert tree.order() == [[1, 1], [1], [3], [4], [2]]
