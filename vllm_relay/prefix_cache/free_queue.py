# SPDX-License-Identifier: Apache-2.0
"""The free blocks of vLLM's block pool, in the order of an eviction policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import dropwhile
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

from vllm_relay.config import EvictionPolicyName
from vllm_relay.prefix_cache.next_use import NextUse
from vllm_relay.prefix_cache.policies import (
    EvictionPolicy,
    PrefixNode,
    PrefixTree,
    Rank,
    make_policy,
)

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class PolicyFreeQueue:
    """Takes the place of vLLM's ``FreeKVCacheBlockQueue``.

    Blocks that are not cached leave first, as in vLLM: the one freed last before all others. Then
    cached blocks leave in the order of the policy, children before their parents.

    Args:
        blocks: all blocks of the pool, free and not cached.
        policy: of this queue alone.
        next_use: what waiting requests need.
    """

    def __init__(
        self, blocks: list[KVCacheBlock], policy: EvictionPolicy, next_use: NextUse
    ) -> None:
        self.evicted_blocks = {"unused": 0, "needed": 0}
        """Cached blocks that left, by whether a waiting request needed them."""
        self._uncached = FreeKVCacheBlockQueue(blocks)
        self._cached: dict[int, _FreeBlock] = {}
        self._heap: list[tuple[Rank, int]] = []  # with outdated entries: see _is_current
        self._num_freed = 0
        self._policy = policy
        self._next_use = next_use
        self._tree = PrefixTree(policy, max_nodes_in_use=2 * len(blocks))
        if policy.looks_ahead:
            next_use.listen(self._rank_again)

    @property
    def num_free_blocks(self) -> int:
        return self._uncached.num_free_blocks + len(self._cached)

    def note_chain(self, keys: Sequence[bytes], *, is_use: bool = True) -> None:
        """Tells the policy of a request that is admitted.

        Call it again before its blocks are freed where it generated whole blocks, or computed some
        that another request computed as well: without it, they may outlive their parents.

        Args:
            keys: those of all its whole blocks, from the first on, as they are on the blocks.
            is_use: False where the request was counted already.
        """
        self._tree.note_chain(keys, is_use=is_use)
        self._rank_again(keys)

    def popleft(self) -> KVCacheBlock:
        """Takes the block that leaves first.

        Raises:
            ValueError: no block is free.
        """
        if not self.num_free_blocks:
            raise ValueError("No free blocks available")
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Takes the `n` blocks that leave first, in this order."""
        assert n <= self.num_free_blocks, f"{n} blocks of {self.num_free_blocks} free ones"
        if n > self._uncached.num_free_blocks:
            self._release_uncached()
        blocks = self._uncached.popleft_n(min(n, self._uncached.num_free_blocks))
        while len(blocks) < n:
            blocks.append(self._evict_first())
        return blocks

    def remove(self, block: KVCacheBlock) -> None:
        """Takes a free block that is used again.

        Raises:
            RuntimeError: the block is not free.
        """
        free = self._cached.pop(block.block_id, None)
        if free is None:
            self._uncached.remove(block)
        else:
            self._release(self._tree.use(free.node, free))

    def append(self, block: KVCacheBlock) -> None:
        self.append_n([block])

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        """Frees blocks of a request, the last of its chain first."""
        self._release_uncached()
        for block in blocks:
            key = block.block_hash
            if key is None:
                self._uncached.append(block)
                continue
            free = _FreeBlock(block, self._num_freed)
            self._num_freed += 1
            self._cached[block.block_id] = free
            free.node = self._tree.free(key, block.block_hash_num_tokens or 0, free)
            self._push(free)

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        """Frees blocks that leave before all others, in this order."""
        self._uncached.prepend_n(blocks)

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """The free blocks in the order in which they would leave, which costs a sort of them."""
        return list(self.iter_blocks_after(None))

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        """The free blocks behind `cursor`, or all, in the order in which they would leave now.

        The queue must not change meanwhile. Behind a block that is not free there is none.
        """
        blocks = self._in_order()
        if cursor is not None:
            blocks = dropwhile(lambda block: block is not cursor, blocks)
            next(blocks, None)
        return blocks

    def _in_order(self) -> Iterator[KVCacheBlock]:
        yield from self._uncached.get_all_free_blocks()
        heap = list(filter(self._is_current, self._heap))
        heapify(heap)
        copies_gone: Counter[bytes] = Counter()
        children_gone: Counter[bytes] = Counter()
        while heap:
            free = self._cached[heappop(heap)[1]]
            yield free.block
            node = free.node
            copies_gone[node.key] += 1
            if copies_gone[node.key] < len(node.copies) or node.parent is None:
                continue
            parent = self._tree.nodes[node.parent]
            children_gone[parent.key] += 1
            if children_gone[parent.key] == parent.free_children:
                for copy in parent.copies:
                    heappush(heap, (self._policy.rank(parent, copy.freed_at), copy.block.block_id))

    def _evict_first(self) -> KVCacheBlock:
        free = self._first()
        assert free is not None, "every tree of free blocks has a leaf"
        node = free.node
        is_needed = len(node.copies) == 1 and self._next_use.next_use(node.key) is not None
        self.evicted_blocks["needed" if is_needed else "unused"] += 1
        self._forget(free)
        return free.block

    def _first(self) -> _FreeBlock | None:
        """The cached block that leaves first. It stays."""
        heap = self._heap
        while heap and not self._is_current(heap[0]):
            heappop(heap)
        return self._cached[heap[0][1]] if heap else None

    def _is_current(self, entry: tuple[Rank, int]) -> bool:
        rank, block_id = entry
        free = self._cached.get(block_id)
        return free is not None and free.rank is rank and not free.node.free_children

    def _forget(self, free: _FreeBlock) -> None:
        del self._cached[free.block.block_id]
        self._release(self._tree.evict(free.node, free))

    def _release(self, node: PrefixNode | None) -> None:
        """Ranks the blocks of a node that lost its last free child."""
        if node is not None:
            for free in node.copies:
                free.rank = None  # what the heap had of it may be gone
                self._push(free)

    def _rank_again(self, keys: Iterable[bytes]) -> None:
        nodes = self._tree.nodes
        for key in keys:
            node = nodes.get(key)
            if node is not None:
                for free in node.copies:
                    self._push(free)

    def _push(self, free: _FreeBlock) -> None:
        """Brings the heap up to date with a block whose rank changed."""
        if free.node.free_children:
            free.rank = None
            return
        rank = self._policy.rank(free.node, free.freed_at)
        if rank == free.rank:
            return
        free.rank = rank
        heappush(self._heap, (rank, free.block.block_id))
        if len(self._heap) > 64 + 2 * len(self._cached):
            self._heap = list(filter(self._is_current, self._heap))
            heapify(self._heap)

    def _release_uncached(self) -> None:
        """Blocks that lost their hash while they were free leave with those that are not cached.

        vLLM resets all hashes at once, so the one that leaves first tells. Where it evicts single
        blocks, they leave in their turn.
        """
        first = self._first()
        if first is None or first.block.block_hash == first.node.key:
            return
        for free in list(self._cached.values()):
            if free.block.block_hash != free.node.key:
                self._forget(free)
                self._uncached.append(free.block)


class _FreeBlock:
    """A stay of a cached block in the queue."""

    __slots__ = ("block", "freed_at", "node", "rank")

    node: PrefixNode
    rank: Rank | None
    """As in the heap; None where it is not in the heap."""

    def __init__(self, block: KVCacheBlock, freed_at: int) -> None:
        self.block = block
        self.freed_at = freed_at
        self.rank = None


class StockFreeQueue(FreeKVCacheBlockQueue):
    """vLLM's own queue, and its order, with the counters of `PolicyFreeQueue`."""

    def __init__(self, blocks: list[KVCacheBlock], next_use: NextUse) -> None:
        super().__init__(blocks)
        self.evicted_blocks = {"unused": 0, "needed": 0}
        self._next_use = next_use

    def popleft(self, *args: Any, **kwargs: Any) -> KVCacheBlock:
        block = super().popleft(*args, **kwargs)
        self._count([block])
        return block

    def popleft_n(self, n: int, *args: Any, **kwargs: Any) -> list[KVCacheBlock]:
        blocks = super().popleft_n(n, *args, **kwargs)
        self._count(blocks)
        return blocks

    def _count(self, blocks: list[KVCacheBlock]) -> None:
        for block in blocks:
            if block.block_hash is not None:
                is_needed = self._next_use.next_use(block.block_hash) is not None
                self.evicted_blocks["needed" if is_needed else "unused"] += 1


FreeQueue = PolicyFreeQueue | StockFreeQueue


def make_free_queue(
    name: EvictionPolicyName, next_use: NextUse
) -> Callable[[list[KVCacheBlock]], FreeQueue]:
    """What to put in the place of ``vllm.v1.core.block_pool.FreeKVCacheBlockQueue`` while block
    pools are built. Every pool gets a policy of its own."""
    if name == "lru":
        return lambda blocks: StockFreeQueue(blocks, next_use)
    return lambda blocks: PolicyFreeQueue(blocks, make_policy(name, next_use), next_use)
