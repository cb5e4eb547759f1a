# SPDX-License-Identifier: Apache-2.0
"""Every eviction of random traces through vLLM's block pool equals that of a brute-force oracle."""

from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core import block_pool
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from vllm_relay.prefix_cache.free_queue import PolicyFreeQueue, make_free_queue
from vllm_relay.prefix_cache.next_use import NextUse
from vllm_relay.prefix_cache.policies import Gdsf, Lru, PrefixTree, make_policy

BLOCK_SIZE_TOKENS = 16
NUM_BLOCKS = 14
POLICIES = ["queue", "lru", "fifo", "gdsf"]


def keys_of(path):
    """Keys that show which blocks they stand for: a key starts with that of its parent."""
    return [make_block_hash_with_group_id(bytes(path[: end + 1]), 0) for end in range(len(path))]


def path_of(key):
    return key[:-4]


class FreeBlock:
    def __init__(self, block, freed_at):
        self.block, self.freed_at = block, freed_at
        self.path = path_of(block.block_hash)
        self.depth = block.block_hash_num_tokens


class QueueOracle:
    """Which of the free cached blocks leaves, by definition: the one of least worth, where a block
    is worth as much as the most valuable of its free children, theirs, and so on."""

    def __init__(self, next_use):
        self.next_use = next_use

    def worth(self, free):
        position = self.next_use.next_use(free.block.block_hash)
        return (0, free.freed_at) if position is None else (1, -position)

    def victim(self, frees):
        def worth_of_descendants(free):
            children = [other for other in frees if other.path[:-1] == free.path]
            return max([self.worth(free), *map(worth_of_descendants, children)])

        return min(frees, key=lambda free: (worth_of_descendants(free), -free.depth, free.freed_at))

    def admitted(self, path):
        pass

    def evicted(self, path):
        pass


class LruOracle(QueueOracle):
    def worth(self, free):
        return (0, free.freed_at)


class GdsfOracle(QueueOracle):
    def __init__(self, next_use):
        self.age, self.uses, self.values = 0, {}, {}

    def worth(self, free):
        return self.values[free.path]

    def admitted(self, path):
        for end in range(1, len(path) + 1):
            self.uses[path[:end]] = self.uses.get(path[:end], 0) + 1
            self.values[path[:end]] = self.age + self.uses[path[:end]]

    def evicted(self, path):
        self.age = max(self.age, self.values.pop(path))
        del self.uses[path]


class FifoOracle:
    """Walks down from the tree that was cached first: what continues a block leaves before it."""

    def __init__(self, next_use):
        self.num_cached, self.cached_at = 0, {}

    def victim(self, frees):
        free_of_path = {free.path: free for free in frees}
        victim, path = None, b""
        while True:
            children = [
                child
                for child in self.cached_at
                if child[:-1] == path and any(other.startswith(child) for other in free_of_path)
            ]
            if not children:
                return victim
            path = min(children, key=self.cached_at.get)
            victim = free_of_path.get(path)

    def admitted(self, path):
        for end in range(1, len(path) + 1):
            if path[:end] not in self.cached_at:
                self.cached_at[path[:end]] = self.num_cached
                self.num_cached += 1

    def evicted(self, path):
        del self.cached_at[path]


ORACLES = {"queue": QueueOracle, "lru": LruOracle, "fifo": FifoOracle, "gdsf": GdsfOracle}


class CheckedQueue(PolicyFreeQueue):
    """Compares every block that leaves with the oracle's choice."""

    def __init__(self, blocks, policy, next_use, oracle):
        super().__init__(blocks, policy, next_use)
        self.oracle, self.next_use = oracle, next_use
        self.uncached, self.frees, self.num_evicted = list(blocks), [], 0
        self.num_appended = 0
        self.expected_evictions = {"unused": 0, "needed": 0}

    def take(self):
        if self.uncached:
            return self.uncached.pop(0)
        victim = self.oracle.victim(self.frees)
        self.frees.remove(victim)
        self.num_evicted += 1
        copies = [free for free in self.frees if free.path == victim.path]
        needed = self.next_use.next_use(victim.block.block_hash) is not None and not copies
        self.expected_evictions["needed" if needed else "unused"] += 1
        if not copies:
            self.oracle.evicted(victim.path)
            assert not any(free.path[:-1] == victim.path for free in self.frees)
        return victim.block

    def popleft_n(self, n):
        in_order = self.get_all_free_blocks()
        assert len(in_order) == self.num_free_blocks == len(self.uncached) + len(self.frees)
        blocks = super().popleft_n(n)
        assert [b.block_id for b in blocks] == [b.block_id for b in in_order[:n]]
        assert [b.block_id for b in blocks] == [self.take().block_id for _ in range(n)]
        assert self.evicted_blocks == self.expected_evictions
        return blocks

    def remove(self, block):
        super().remove(block)
        self.frees = [free for free in self.frees if free.block is not block]

    def append_n(self, blocks):
        for block in blocks:
            self.frees.append(FreeBlock(block, self.num_appended))
            self.num_appended += 1
        super().append_n(blocks)

    def prepend_n(self, blocks):
        self.uncached[:0] = blocks
        super().prepend_n(blocks)

    def note_chain(self, keys, *, is_use=True):
        super().note_chain(keys, is_use=is_use)
        if is_use:
            self.oracle.admitted(path_of(keys[-1]))


class Cache:
    """A block pool and the requests that run and wait."""

    def __init__(self, make_queue, note_at_end=False):
        self.note_at_end = note_at_end
        self.next_use = NextUse()
        with mock.patch.object(
            block_pool, "FreeKVCacheBlockQueue", lambda blocks: make_queue(blocks, self.next_use)
        ):
            self.pool = block_pool.BlockPool(NUM_BLOCKS, True, BLOCK_SIZE_TOKENS)
        self.running, self.waiting, self.taken = [], {}, []

    def admit(self, path, num_uncached_blocks, cache_late):
        """Runs a request unless it is too long, and caches its prompt now or when it ends."""
        keys, hits = keys_of(path), []
        for key in keys:
            block = self.pool.cached_block_hash_to_block.get_one_block(key)
            if block is None:
                break
            hits.append(block)
        num_new = len(path) - len(hits) + num_uncached_blocks
        free_hits = sum(block.ref_cnt == 0 for block in hits)
        if num_new > self.pool.get_num_free_blocks() - free_hits:
            return
        self.pool.touch(hits)
        new = self.pool.get_new_blocks(num_new)
        self.taken.append([block.block_id for block in new])
        self.note_chain(keys)
        hashes = [path_of(key) for key in keys]
        request = (SimpleNamespace(block_hashes=hashes), hits + new, len(hits))
        if not cache_late:
            self.cache(*request)
            request = (request[0], request[1], len(hashes))
        self.running.append(request)

    def note_chain(self, keys, is_use=True):
        if hasattr(self.pool.free_block_queue, "note_chain"):
            self.pool.free_block_queue.note_chain(keys, is_use=is_use)

    def cache(self, request, blocks, num_cached):
        num_full = len(request.block_hashes)
        self.pool.cache_full_blocks(request, blocks, num_cached, num_full, BLOCK_SIZE_TOKENS, 0)

    def finish(self, index):
        if self.running:
            request = self.running.pop(index % len(self.running))
            if self.note_at_end:
                self.note_chain(keys_of(request[0].block_hashes[-1]), is_use=False)
            self.cache(*request)
            self.pool.free_blocks(reversed(request[1]))

    def wait(self, position, path):
        """A request waits at this position, or the one that did is gone."""
        keys = self.waiting.pop(position, None)
        if keys is None:
            self.waiting[position] = keys_of(path)
            self.next_use.add(position, self.waiting[position])
        else:
            self.next_use.remove(position, keys)

    def do(self, step, cache_late):
        action, number, path = step
        if action == "admit":
            self.admit(bytes(path), number % 3, cache_late and number % 2 == 1)
        elif action == "finish":
            self.finish(number)
        else:
            self.wait(number, bytes(path))


paths = st.lists(st.integers(0, 2), min_size=1, max_size=5)
actions = st.sampled_from(["admit", "admit", "finish", "wait"])
steps = st.lists(st.tuples(actions, st.integers(0, 9), paths), min_size=20, max_size=80)


@pytest.mark.parametrize(
    ("name", "cache_late"),
    [("queue", False), ("queue", True), ("lru", False), ("lru", True), ("fifo", False),
     ("gdsf", False)],
)  # fmt: skip
def test_evicts_what_the_oracle_evicts(name, cache_late):
    num_evicted = 0

    @settings(max_examples=150)
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


@settings(max_examples=300)
@given(steps)
def test_lru_takes_the_same_blocks_as_vllm(steps):
    """With the heap too, which `lru` does not use."""
    stock = Cache(lambda blocks, next_use: STOCK_QUEUE(blocks))
    ours = Cache(lambda blocks, next_use: PolicyFreeQueue(blocks, Lru(), next_use))
    for step in steps:
        stock.do(step, cache_late=False)
        ours.do(step, cache_late=False)
        assert stock.taken == ours.taken
        assert blocks_in_order(stock) == blocks_in_order(ours)


@settings(max_examples=100)
@given(steps)
def test_the_queue_of_lru_takes_the_same_blocks_as_vllm(steps):
    stock = Cache(lambda blocks, next_use: STOCK_QUEUE(blocks))
    ours = Cache(lambda blocks, next_use: make_free_queue("lru", next_use)(blocks))
    for step in steps:
        stock.do(step, cache_late=True)
        ours.do(step, cache_late=True)
        assert stock.taken == ours.taken
        assert blocks_in_order(stock) == blocks_in_order(ours)


@pytest.mark.parametrize("name", POLICIES)
def test_children_leave_before_their_parents(name):
    """Whatever is freed first, and whoever waits for it."""

    @settings(max_examples=150)
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


def test_gdsf_weighs_the_cost():
    cache = Cache(
        lambda blocks, next_use: PolicyFreeQueue(
            blocks, Gdsf(lambda index: 10.0 if index == 0 else 1.0), next_use
        )
    )
    for path in ([1, 1], [1, 1], [2], [3]):
        cache.admit(bytes(path), 0, False)
        cache.finish(0)
    free = cache.pool.free_block_queue.get_all_free_blocks()
    order = [list(path_of(block.block_hash)) for block in free if block.block_hash]
    assert order == [[1, 1], [2], [3], [1]]


def test_queue_keeps_what_is_needed_soonest():
    tree = Tree("queue").run([1, 1], [2], [3], [4])
    tree.cache.wait(5, [1, 1])
    tree.cache.wait(6, [2])
    assert tree.order() == [[3], [4], [2], [1, 1], [1]]
    tree.cache.wait(3, [2])
    assert tree.order() == [[3], [4], [1, 1], [1], [2]]
    tree.cache.wait(5, [])
    assert tree.order() == [[1, 1], [1], [3], [4], [2]]


@settings(max_examples=200)
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
