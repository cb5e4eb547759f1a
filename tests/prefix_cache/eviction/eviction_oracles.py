# SPDX-License-Identifier: Apache-2.0
"""Which block each policy evicts, by brute force, and a queue that is compared with it."""

from collections import deque

from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

from tests.prefix_cache.eviction.block_pool_traces import path_of
from vllm_relay.prefix_cache.eviction.free_queue import PolicyFreeQueue
from vllm_relay.prefix_cache.eviction.set_aside import KeptBlock


class FreeBlock:
    def __init__(self, block, freed_at):
        self.block, self.freed_at = block, freed_at
        self.path = path_of(block.block_hash)
        self.depth = block.block_hash_num_tokens


class NeededOracle:
    """Which of the free cached blocks leaves, by definition, where none is kept for its uses: that
    which nobody needs for the longest time, then that which is needed last."""

    def __init__(self, queue):
        self.next_use = queue.next_use

    def worth(self, free):
        rank = self.next_use.next_use(free.block.block_hash)
        return (0, free.freed_at) if rank is None else (1, *(-each for each in rank))

    def victim(self, frees):
        return min(frees, key=lambda free: (self.worth(free), -free.depth, free.freed_at))


class UsedOracle:
    """The same where nobody waits: the oldest block leaves if it was used once; else it comes to
    those that are kept, of which the first leaves if they are too many, or nothing else is left."""

    def __init__(self, queue):
        self.reuse, self.kept = queue.reuse, []

    def victim(self, frees):
        self.kept = [free for free in self.kept if free in frees]
        while True:
            others = [free for free in frees if free not in self.kept]
            if len(self.kept) > self.reuse.room_blocks or not others:
                return self.kept[0]
            first = min(others, key=lambda free: free.freed_at)
            if not self.reuse.is_reused(first.block.block_hash):
                return first
            self.kept.append(first)


class CheckedQueue(PolicyFreeQueue):
    """Compares every block that leaves with the oracle's choice."""

    def __init__(self, blocks, next_use, reuse, oracle):
        super().__init__(blocks, next_use, reuse)
        self.next_use, self.reuse, self.blocks = next_use, reuse, blocks
        self.oracle = oracle(self)
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
            key = victim.block.block_hash
            if sum(block.block_hash == key for block in self.blocks) == 1:
                assert not any(free.path[:-1] == victim.path for free in self.frees)
        return victim.block

    def popleft_n(self, n):
        in_order = leaving_order(self)
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


def leaving_order(queue):
    """The free blocks in the order in which they would leave."""
    if not isinstance(queue, PolicyFreeQueue):
        return queue.get_all_free_blocks()
    queue._first_aside()
    aside = sorted(queue._aside, key=queue._place)
    needed = [kept for kept in aside if queue._place(kept)[0] == 1]
    unneeded = deque(aside[: len(aside) - len(needed)])
    listed, reused = (
        deque(block for block in blocks if block.block_id != -1)
        for blocks in (
            FreeKVCacheBlockQueue.get_all_free_blocks(queue),
            queue._reused.get_all_free_blocks(),
        )
    )
    order = []
    while listed or reused or unneeded:
        first = listed[0] if listed else None
        stays = False
        is_cached = first is None or first.block_hash is not None
        has_surplus = len(reused) > queue._reuse.room_blocks
        if is_cached and reused and (has_surplus or reused[0].block_hash is None):
            block = reused.popleft()
        elif unneeded and queue._leaves_before(unneeded[0], first):
            block = unneeded.popleft().block
            stays = block.block_hash is not None and queue._reuse.is_reused(block.block_hash)
        elif first is not None:
            block = listed.popleft()
            stays = block.block_hash is not None and queue._reuse.is_reused(block.block_hash)
        else:
            block = reused.popleft()
        if block.block_hash in queue._needed:
            needed.append(
                KeptBlock(block, block.block_hash, queue._freed_at[block.block_id], False)
            )
        elif stays:
            reused.append(block)
        else:
            order.append(block)
    return order + [kept.block for kept in sorted(needed, key=queue._place)]
