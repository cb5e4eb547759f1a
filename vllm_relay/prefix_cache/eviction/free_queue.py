# SPDX-License-Identifier: Apache-2.0
"""The free blocks of vLLM's block pool, in the order in which they leave.

A prompt frees its blocks last first, and whoever needs or used a block needs or used all before it.
So of the blocks of a prompt the deepest is freed first, needed last and used least, and leaves
first: no block leaves before the free ones that follow it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from itertools import dropwhile
from math import inf
from typing import Any

from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

from vllm_relay.config import EvictionPolicyName
from vllm_relay.prefix_cache.eviction.next_use import Chains, NextUse
from vllm_relay.prefix_cache.eviction.reuse import Reuse
from vllm_relay.prefix_cache.eviction.set_aside import KeptBlock, Place, SetAside


class StockFreeQueue(FreeKVCacheBlockQueue):
    """vLLM's own queue, and its order, with a count of what it evicts."""

    def __init__(self, blocks: list[KVCacheBlock], next_use: NextUse) -> None:
        super().__init__(blocks)
        self.evicted_blocks = {"unused": 0, "needed": 0}
        """Cached blocks that left, by whether a waiting request needed them."""
        self._next_use = next_use.next_use

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
                is_needed = self._next_use(block.block_hash) is not None
                self.evicted_blocks["needed" if is_needed else "unused"] += 1


class PolicyFreeQueue(FreeKVCacheBlockQueue):
    """vLLM's queue, from which blocks are set aside that are kept longer.

    In vLLM's list, which is LRU behind blocks that are not cached, a block is looked at when its
    turn has come. If a waiting request needs it, or several have used it, it is set aside. When
    nothing else is left, those leave that were only used, the longest ago first, and then the one
    that is needed last. Of the used ones no more are kept than `Reuse` has room for, and who is
    kept for nothing any more leaves at its turn by LRU.

    Args:
        blocks: all blocks of the pool, free and not cached.
        next_use: what waiting requests need.
        reuse: of this queue alone.
    """

    def __init__(self, blocks: list[KVCacheBlock], next_use: NextUse, reuse: Reuse) -> None:
        super().__init__(blocks)  # counts in num_free_blocks; we add those that are set aside
        self.evicted_blocks = {"unused": 0, "needed": 0}
        """Cached blocks that left, by whether a waiting request needed them."""
        self._next_use, self._reuse = next_use.next_use, reuse
        self._reused: OrderedDict[int, KeptBlock] = OrderedDict()
        """By block id, those that are set aside because they were used; the first leaves first."""
        self._freed_at = [0] * len(blocks)  # by block id: how many were freed before
        self._num_freed = 1  # none has the number of those that never were
        self._aside = SetAside(self._place)
        self._walk_mark = KVCacheBlock(block_id=-1)
        """In the list behind the last block that the walk has passed; nowhere if it passed none."""
        self._passed: KVCacheBlock | None = None  # the last one
        self._shown: tuple[KVCacheBlock, int] | None = None  # not passed yet; when it was freed
        next_use.listen(self._on_remove)

    def popleft(self) -> KVCacheBlock:
        """Takes the block that leaves first.

        Raises:
            ValueError: no block is free.
        """
        if not self.num_free_blocks:
            raise ValueError("No free blocks available")
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int, *args: Any, **kwargs: Any) -> list[KVCacheBlock]:
        """Takes the `n` blocks that leave first, in this order."""
        assert n <= self.num_free_blocks, f"{n} blocks of {self.num_free_blocks} free ones"
        taken: list[KVCacheBlock] = []
        while len(taken) < n:
            self._first_listed(self.fake_free_list_head, self._is_kept)
            kept = self._first_aside()
            num_listed = self._num_leaving(n - len(taken), kept)
            if num_listed or kept is None:
                taken += super().popleft_n(num_listed, *args, **kwargs)
            else:
                taken.append(self._evict(kept))
        return taken

    def remove(self, block: KVCacheBlock, *args: Any, **kwargs: Any) -> None:
        """Takes a free block that is used again.

        Raises:
            RuntimeError: the block is not free.
        """
        kept = self._aside.get(block)
        if kept is None:
            super().remove(block, *args, **kwargs)
        else:
            self._take_aside(kept)

    def append(self, block: KVCacheBlock) -> None:
        self.append_n([block])

    def append_n(self, blocks: list[KVCacheBlock], *args: Any, **kwargs: Any) -> None:
        """Frees blocks of a request, the last of its chain first."""
        super().append_n(blocks, *args, **kwargs)
        self._number(blocks)

    def prepend_n(self, blocks: list[KVCacheBlock], *args: Any, **kwargs: Any) -> None:
        """Frees blocks that leave before all others, in this order."""
        super().prepend_n(blocks, *args, **kwargs)
        self._number(blocks)

    def get_all_free_blocks(self, *args: Any, **kwargs: Any) -> list[KVCacheBlock]:
        """The free blocks in the order in which they would leave, which costs a sort of them."""
        self._first_aside()
        blocks = [kept.block for kept in self._aside]
        places = {
            kept.block.block_id: (self._place(kept), 0, kept.freed_at) for kept in self._aside
        }
        reused = deque(self._reused.values())
        listed_at = -1.0
        for index, block in enumerate(super().get_all_free_blocks(*args, **kwargs)):
            if block is self._walk_mark:
                continue
            place: Place = (0, listed_at)
            key, freed_at = block.block_hash, self._freed_at[block.block_id]
            if key is not None:
                kept = self._kept(block, key, False)
                place = self._place(kept)
                if place[0] == 0 and self._reuse.is_reused(key):
                    place = (1, freed_at)
                    reused.append(kept)
                elif place[0] == 0:
                    listed_at = freed_at
            blocks.append(block)
            places[block.block_id] = (place, index, freed_at)
            if len(reused) > self._reuse.room_blocks:
                first = reused.popleft()
                if self._next_use(first.key) is None:
                    place = (0, max(listed_at, first.freed_at))
                    places[first.block.block_id] = (place, index, first.freed_at)
        return sorted(blocks, key=lambda block: places[block.block_id])

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        """The free blocks behind `cursor`, or all, in the order in which they would leave now, but
        those of vLLM's list that will be kept because they were used are shown where they are.

        Behind the block that was shown last, or the one before it, a walk goes on: whatever is
        freed and taken meanwhile, it shows every cached block once for each time that it is freed.
        Behind another block, what is before it is looked at again; behind one that is not free,
        there is none. The queue must not change between two blocks.
        """
        goes_on = True
        if self._shown is not None and cursor is self._shown[0]:
            self._pass_shown()
        elif cursor is None or cursor is not self._passed:
            goes_on = cursor is None
            self._aside.begin_walk()
            self._unlink_mark()
            self._passed = self._shown = None
        blocks = self._walk()
        if not goes_on:
            blocks = dropwhile(lambda block: block is not cursor, blocks)
            next(blocks, None)
        return blocks

    def _walk(self) -> Iterator[KVCacheBlock]:
        while (block := self._next_of_walk()) is not None:
            self._shown = block, self._freed_at[block.block_id]
            yield block
            self._pass_shown()

    def _next_of_walk(self) -> KVCacheBlock | None:
        mark = self._walk_mark
        block = self._first_listed(
            self.fake_free_list_head if _is_alone(mark) else mark, self._is_needed
        )
        kept = self._aside.first_ahead()
        if kept is None or (block is not None and not self._leaves_before(kept, block)):
            return block
        return kept.block

    def _pass_shown(self) -> None:
        if self._shown is None:
            return
        block, freed_at = self._shown
        self._passed, self._shown = block, None
        if self._freed_at[block.block_id] != freed_at:
            return  # it was taken and freed again
        kept = self._aside.get(block)
        if kept is not None:
            self._aside.pass_over(kept)
        elif not _is_alone(block):
            self._unlink_mark()
            self._link_mark_behind(block)

    def _first_listed(
        self, before: KVCacheBlock, is_kept: Callable[[bytes], bool]
    ) -> KVCacheBlock | None:
        """The first block of the list behind `before` that is not kept; those between are set
        aside, until one of these has to make room."""
        mark = self._walk_mark
        while (block := before.next_free_block) is not self.fake_free_list_tail:
            assert block is not None
            key = block.block_hash
            if block is mark:
                self._unlink_mark()
            elif key is None or not is_kept(key):
                return block
            else:
                is_passed = before is not mark and not _is_alone(mark)
                super().remove(block)
                self.num_free_blocks += 1
                kept = self._kept(block, key, is_passed)
                if not self._is_needed(key):
                    self._reused[block.block_id] = kept
                self._aside.add(kept)
                if self._leave_room():
                    break
        return None

    def _is_needed(self, key: bytes) -> bool:
        return self._next_use(key) is not None

    def _is_kept(self, key: bytes) -> bool:
        return self._next_use(key) is not None or self._reuse.is_reused(key)

    def _leave_room(self) -> bool:
        """Of those that are kept because they were used, keep no more than there is room for;
        returns whether one leaves next."""
        leaves = False
        while len(self._reused) > self._reuse.room_blocks:
            _, kept = self._reused.popitem(last=False)
            self._aside.rank_again([kept.key])
            leaves = leaves or not self._is_needed(kept.key)
        return leaves

    def _num_leaving(self, n: int, kept: KeptBlock | None) -> int:
        """How many blocks leave at the head of the list, `n` at most, before one that is kept there
        or the one that is set aside."""
        next_use, (new, old) = self._next_use, self._reuse.reused
        mark, tail, freed_at, before = (
            self._walk_mark,
            self.fake_free_list_tail,
            self._freed_at,
            inf,
        )
        if kept is not None and kept.place[0] == 0:
            before = kept.freed_at
        num_leaving = 0
        keys: list[bytes] = []
        block = self.fake_free_list_head.next_free_block
        while num_leaving < n and block is not tail and block is not mark:
            assert block is not None
            key = block.block_hash
            if key is not None:
                if (
                    key in new
                    or key in old
                    or freed_at[block.block_id] > before
                    or next_use(key) is not None
                ):
                    break
                keys.append(key)
            num_leaving += 1
            block = block.next_free_block
        self.evicted_blocks["unused"] += len(keys)
        self._reuse.on_evict(keys, False)
        return num_leaving

    def _evict(self, kept: KeptBlock) -> KVCacheBlock:
        if kept.is_cached:
            is_last = self._aside.num_copies(kept.key) == 1
            is_needed = is_last and self._next_use(kept.key) is not None
            self.evicted_blocks["needed" if is_needed else "unused"] += 1
            if not is_needed:
                self._reuse.on_evict([kept.key], self._reuse.is_reused(kept.key))
        self._take_aside(kept)
        return kept.block

    def _first_aside(self) -> KeptBlock | None:
        """The first of those that are set aside.

        vLLM resets all hashes at once, so this one tells; then those that lost theirs leave with
        blocks that are not cached. Where it evicts single blocks, they leave in their turn.
        """
        first = self._aside.first()
        if first is None or first.is_cached:
            return first
        uncached = [kept for kept in self._aside if not kept.is_cached]
        for kept in uncached:
            self._take_aside(kept)
        super().prepend_n([kept.block for kept in uncached])
        return self._aside.first()

    def _take_aside(self, kept: KeptBlock) -> None:
        self._aside.remove(kept)
        self._reused.pop(kept.block.block_id, None)
        self.num_free_blocks -= 1

    def _kept(self, block: KVCacheBlock, key: bytes, is_passed: bool) -> KeptBlock:
        return KeptBlock(block, key, self._freed_at[block.block_id], is_passed)

    def _leaves_before(self, kept: KeptBlock, block: KVCacheBlock) -> bool:
        """Whether a block that is set aside leaves before one of the list that is not kept."""
        is_cached = block.block_hash is not None
        return is_cached and kept.place < (0, self._freed_at[block.block_id])

    def _place(self, kept: KeptBlock) -> Place:
        rank = self._next_use(kept.key)
        if rank is None:
            return (int(kept.block.block_id in self._reused), kept.freed_at)
        return (2, *(-each for each in rank), -kept.depth_tokens, kept.freed_at)

    def _number(self, blocks: list[KVCacheBlock]) -> None:
        freed_at = self._freed_at
        for number, block in enumerate(blocks, self._num_freed):
            freed_at[block.block_id] = number
        self._num_freed += len(blocks)

    def _on_remove(self, chains: Chains, runs: bool) -> None:
        for chain in chains:
            if runs:
                self._reuse.on_use(chain)
            self._aside.rank_again(chain)
        self._leave_room()

    def _link_mark_behind(self, block: KVCacheBlock) -> None:
        mark, behind = self._walk_mark, block.next_free_block
        assert behind is not None
        mark.prev_free_block, mark.next_free_block = block, behind
        block.next_free_block = behind.prev_free_block = mark

    def _unlink_mark(self) -> None:
        mark = self._walk_mark
        if mark.prev_free_block is not None and mark.next_free_block is not None:
            mark.prev_free_block.next_free_block = mark.next_free_block
            mark.next_free_block.prev_free_block = mark.prev_free_block
            mark.prev_free_block = mark.next_free_block = None


def _is_alone(block: KVCacheBlock) -> bool:
    """Whether it is in no list."""
    return block.next_free_block is None


FreeQueue = PolicyFreeQueue | StockFreeQueue


def make_free_queue(
    name: EvictionPolicyName, next_use: NextUse
) -> Callable[[list[KVCacheBlock]], FreeQueue]:
    """What to put in the place of ``vllm.v1.core.block_pool.FreeKVCacheBlockQueue`` while block
    pools are built."""
    if name == "lru":
        return lambda blocks: StockFreeQueue(blocks, next_use)
    return lambda blocks: PolicyFreeQueue(blocks, next_use, Reuse(len(blocks)))
