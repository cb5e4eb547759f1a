# SPDX-License-Identifier: Apache-2.0
"""Every eviction of random traces through vLLM's block pool equals that of a brute-force oracle."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core import block_pool

from tests.prefix_cache.block_pool_traces import NUM_BLOCKS, Cache, keys_of, path_of, paths, steps
from tests.prefix_cache.eviction_oracles import ORACLES, CheckedQueue
from tests.support.depth import cases
from vllm_relay.prefix_cache.free_queue import PolicyFreeQueue, make_free_queue
from vllm_relay.prefix_cache.next_use import NextUse
from vllm_relay.prefix_cache.policies import EvictionPolicy, Gdsf, PrefixTree, make_policy


class Lru(EvictionPolicy):
    """vLLM's own order, which `PolicyFreeQueue` has to keep too."""

    def rank(self, node, freed_at):
        return (freed_at,)


@pytest.mark.parametrize(
    ("name", "cache_late"),
    [("queue", False), ("queue", True), ("fifo", False), ("gdsf", False)],
)
def test_evicts_what_the_oracle_evicts(name, cache_late):
    num_evicted = 0

    @settings(max_examples=cases(38))
    @given(steps)
    def check(steps):
        nonlocal num_evicted
        cache = Cache(
            lambda blocks, next_use: CheckedQueue(
                blocks, make_policy(name, next_use), next_use, ORACLES[name](next_use)
            ),
            # a copy that was evicted meanwhile took the chain along
            note_at_end=cache_late,
        )
        for step in steps:
            cache.do(step, cache_late)
        while cache.running:
            cache.finish(0)
        assert cache.pool.free_block_queue.num_free_blocks == NUM_BLOCKS - 1
        cache.pool.get_new_blocks(NUM_BLOCKS - 1)
        num_evicted += cache.pool.free_block_queue.num_evicted

    check()
    assert num_evicted > 1000


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
    ours = Cache(lambda blocks, next_use: make_free_queue("lru", next_use)(blocks))
    for step in steps:
        stock.do(step, cache_late=True)
        ours.do(step, cache_late=True)
        assert stock.taken == ours.taken
        assert blocks_in_order(stock) == blocks_in_order(ours)


@pytest.mark.parametrize("name", ORACLES)
def test_children_leave_before_their_parents(name):
    """Whatever is freed first, and whoever waits for it."""

    @settings(max_examples=cases(38))
    @given(steps)
    def check(steps):
        next_use = NextUse()
        cache = Cache(
            lambda blocks, _: PolicyFreeQueue(blocks, make_policy(name, next_use), next_use)
        )
        cache.next_use = next_use
        for step in steps:
            cache.do(step, cache_late=False)
        cache.running.sort(key=lambda request: len(request[1]))
        for request, blocks, num_cached in cache.running:  # parents are freed first
            cache.cache(request, blocks, num_cached)
            cache.pool.free_blocks(blocks)
        gone = []
        for block in cache.pool.free_block_queue.get_all_free_blocks():
            if block.block_hash is not None:
                path = path_of(block.block_hash)
                assert not any(path.startswith(parent) for parent in gone)
                gone.append(path)

    check()


class Tree:
    """Caches whole prefixes and says in which order they leave."""

    def __init__(self, name):
        self.cache = Cache(
            lambda blocks, next_use: PolicyFreeQueue(blocks, make_policy(name, next_use), next_use)
        )

    def run(self, *paths):
        for path in paths:
            self.cache.admit(bytes(path), 0, False)
            self.cache.finish(0)
        return self

    def order(self):
        free = self.cache.pool.free_block_queue.get_all_free_blocks()
        return [list(path_of(block.block_hash)) for block in free if block.block_hash]


def test_fifo_ignores_later_uses_and_takes_a_prefix_with_all_that_continues_it():
    tree = Tree("fifo").run([1, 1], [2], [1, 2], [1, 1, 3], [1], [1, 1])
    assert tree.order() == [[1, 1, 3], [1, 1], [1, 2], [1], [2]]


def test_gdsf_keeps_what_is_used_often_and_ages_it():
    tree = Tree("gdsf").run([1], [1], [1], [2], [3])
    assert tree.order() == [[2], [3], [1]]
    for path in range(10, 60):
        tree.run([path, path])
    assert [1] not in tree.order()


def test_gdsf_counts_a_request_once():
    tree = Tree("gdsf").run([1], [2], [2])
    for _ in range(5):
        tree.cache.note_chain(keys_of(b"\1"), is_use=False)
    assert tree.order() == [[1], [2]]
    tree.cache.note_chain(keys_of(b"\1"))
    tree.cache.note_chain(keys_of(b"\1"))
    assert tree.order() == [[2], [1]]


def test_queue_keeps_what_is_needed_soonest():
    tree = Tree("queue").run([1, 1], [2], [3], [4])
    tree.cache.wait(5, [1, 1])
    tree.cache.wait(6, [2])
    assert tree.order() == [[3], [4], [2], [1, 1], [1]]
    tree.cache.wait(3, [2])
    assert tree.order() == [[3], [4], [1, 1], [1], [2]]
    tree.cache.wait(5, [])
    assert tree.order() == [[1, 1], [1], [3], [4], [2]]


@settings(max_examples=cases(50))
@given(st.lists(st.tuples(paths, st.booleans()), min_size=1, max_size=60), st.integers(0, 6))
def test_the_tree_forgets_chains_that_were_never_cached(chains, max_nodes_in_use):
    tree = PrefixTree(Gdsf(), max_nodes_in_use)
    free = {}
    for path, is_freed in chains:
        keys = keys_of(bytes(path))
        tree.note_chain(keys)
        if is_freed and keys[-1] not in free:
            free[keys[-1]] = tree.free(keys[-1], 16 * len(keys), "block")
        elif keys[-1] in free:
            tree.use(free.pop(keys[-1]), "block")
        ancestors = {path_of(key)[:end] for key in free for end in range(1, len(path_of(key)))}
        kept = {path_of(key) for key in free} | ancestors
        assert len(tree.nodes) <= len(kept) + max_nodes_in_use
        for key, node in tree.nodes.items():
            assert node.children == sum(child.parent == key for child in tree.nodes.values())
            assert node.free_children == sum(child.parent == key for child in free.values())
    for node in free.values():
        tree.evict(node, "block")
    tree.note_chain([])
    assert len(tree.nodes) <= max_nodes_in_use


def test_a_chain_that_becomes_known_late_still_protects_its_parents():
    tree = PrefixTree(Lru(), 100)
    parent_key, child_key = keys_of(b"ab")
    parent, child = tree.free(parent_key, 16, "p"), tree.free(child_key, 32, "c")
    assert parent.free_children == 0
    tree.note_chain([parent_key, child_key])
    assert parent.free_children == 1
    assert tree.evict(child, "c") is parent
