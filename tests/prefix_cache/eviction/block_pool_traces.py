# SPDX-License-Identifier: Apache-2.0
"""Random traces of requests through vLLM's block pool, with any queue of free blocks."""

from types import SimpleNamespace
from unittest import mock

from hypothesis import strategies as st
from vllm.v1.core import block_pool
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from vllm_relay.prefix_cache.eviction.next_use import NextUse

BLOCK_SIZE_TOKENS = 16
NUM_BLOCKS = 14


def keys_of(path):
    """Keys that show which blocks they stand for: a key starts with that of its parent."""
    return [make_block_hash_with_group_id(bytes(path[: end + 1]), 0) for end in range(len(path))]


def path_of(key):
    return key[:-4]


class Cache:
    """A block pool and the requests that run and wait."""

    def __init__(self, make_queue):
        self.next_use = NextUse()
        with mock.patch.object(
            block_pool, "FreeKVCacheBlockQueue", lambda blocks: make_queue(blocks, self.next_use)
        ):
            self.pool = block_pool.BlockPool(NUM_BLOCKS, True, BLOCK_SIZE_TOKENS)
        self.running, self.waiting, self.taken = [], set(), []

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
        self.next_use.add((-1,), [keys])
        self.next_use.remove((-1,), runs=True)
        hashes = [path_of(key) for key in keys]
        request = (SimpleNamespace(block_hashes=hashes), hits + new, len(hits))
        if not cache_late:
            self.cache(*request)
            request = (request[0], request[1], len(hashes))
        self.running.append(request)

    def cache(self, request, blocks, num_cached):
        num_full = len(request.block_hashes)
        self.pool.cache_full_blocks(request, blocks, num_cached, num_full, BLOCK_SIZE_TOKENS, 0)

    def finish(self, index):
        if self.running:
            request = self.running.pop(index % len(self.running))
            self.cache(*request)
            self.pool.free_blocks(reversed(request[1]))

    def wait(self, position, path):
        """A request waits at this position, or the one that did is gone."""
        if position in self.waiting:
            self.waiting.remove(position)
            self.next_use.remove((position,), runs=False)
        else:
            self.waiting.add(position)
            self.next_use.add((position,), [keys_of(path)])

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
admissions = st.lists(
    st.tuples(st.sampled_from(["admit", "finish"]), st.integers(0, 9), paths),
    min_size=20,
    max_size=80,
)
"""Steps of those that never wait."""
