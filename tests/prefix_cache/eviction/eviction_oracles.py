# SPDX-License-Identifier: Apache-2.0
"""Which block each policy evicts, by brute force, and a queue that is compared with it."""

from tests.prefix_cache.eviction.block_pool_traces import path_of
from vllm_relay.prefix_cache.eviction.free_queue import PolicyFreeQueue


class FreeBlock:
    def __init__(self, block, freed_at):
        self.block, self.freed_at = block, freed_at
        self.path = path_of(block.block_hash)
        self.depth = block.block_hash_num_tokens


class QueueOracle:
    """Which of the free cached blocks leaves, by definition: the one of least worth."""

    def __init__(self, next_use):
        self.next_use = next_use

    def worth(self, free):
        rank = self.next_use.next_use(free.block.block_hash)
        return (0, free.freed_at) if rank is None else (1, *(-each for each in rank))

    def victim(self, frees):
        return min(frees, key=lambda free: (self.worth(free), -free.depth, free.freed_at))

    def admitted(self, path):
        pass

    def evicted(self, path):
        pass


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


ORACLES = {"queue": QueueOracle, "gdsf": GdsfOracle}


class CheckedQueue(PolicyFreeQueue):
    """Compares every block that leaves with the oracle's choice."""

    def __init__(self, blocks, policy, next_use, oracle):
        super().__init__(blocks, policy, next_use)
        self.oracle, self.next_use, self.blocks = oracle, next_use, blocks
        self.uncached, self.frees, self.num_evicted = list(blocks), [], 0
        self.num_appended = 0
        self.expected_evictions = {"unused": 0, "needed": 0}
        next_use.listen(self.admitted)

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
            key = victim.block.block_hash
            if sum(block.block_hash == key for block in self.blocks) == 1:
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

    def admitted(self, chains, runs):
        if runs:
            self.oracle.admitted(path_of(chains[0][-1]))
