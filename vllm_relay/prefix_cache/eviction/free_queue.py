# SPDX-License-Identifier: Apache-2.0
"""The free blocks of vLLM's block pool, in the order in which they leave.

A prompt frees its blocks last first, and whoever needs or used a block needs or used all before it.
So of the blocks of a prompt the deepest is freed first, needed last and used least, and leaves
first. A block may outlive the one before it only where it was kept for its uses, and these were
forgotten before the other one, which was in use for longer, was free.
"""

from __future__ import annotations

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
    """vLLM's queue, from which blocks are taken out that are kept longer.

    In vLLM's list, which is LRU behind blocks that are not cached, a block is looked at when its
    turn has come. If several requests have used it, it comes into a second list like it, from which
    blocks leave when they are more than `Reuse` has room for, or nothing is left in the first. If a
    waiting request needs it, it is set aside, and those that are leave last, at first the one that
    is needed last.

    Args:
        blocks: all blocks of the pool, free and not cached.
        next_use: what waiting requests need.
        reuse: of this queue alone.
    """

    def __init__(self, blocks: list[KVCacheBlock], next_use: NextUse, reuse: Reuse) -> None:
        super().__init__(blocks)  # counts in num_free_blocks; we add those that are taken out
        self.evicted_blocks = {"unused": 0, "needed": 0}
        """Cached blocks that left, by whether a waiting request needed them."""
        self._next_use, self._needed, self._reuse = next_use.next_use, next_use.needed, reuse
        self._reused = FreeKVCacheBlockQueue([])
        self._is_in_reused = bytearray(len(blocks))  # by block id
        self._freed_at = [0] * len(blocks)  # by block id: how many were freed before
        self._num_freed = 1  # none has the number of those that never were
        self._aside = SetAside(self._place)
        self._mark = KVCacheBlock(block_id=-1)
        """In the list behind the last block that the walk has passed; nowhere if it passed none."""
        self._mark_of_reused = KVCacheBlock(block_id=-1)
        """The same, but what is behind it may have been passed in the first list."""
        self._passed_at: dict[int, int] = {}  # by block id: when it was freed that was passed
        self._passed: KVCacheBlock | None = None  # the last one
        self._shown: tuple[KVCacheBlock, int] | None = None  # not passed yet; when it was freed
        next_use.listen(self._on_remove)

    def popleft(self) -> KVCacheBlock:
        """Takes the block that leaves first, or raises a ValueError if none is free."""
        if not self.num_free_blocks:
            raise ValueError("No free blocks available")
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int, *args: Any, **kwargs: Any) -> list[KVCacheBlock]:
        """Takes the `n` blocks that leave first, in this order."""
        assert n <= self.num_free_blocks, f"{n} blocks of {self.num_free_blocks} free ones"
        taken: list[KVCacheBlock] = []
        while len(taken) < n:
            wanted = n - len(taken)
            kept, surplus = self._first_aside(), self._surplus()  # may put blocks before the first
            first = _first_of(self, self._mark)
            if surplus and (first is None or first.block_hash is not None):
                taken += self._pop_reused(wanted, surplus)
            elif kept is not None and kept.place[0] == 0 and self._leaves_before(kept, first):
                self._take_aside(kept)
                if self._reuse.is_reused(kept.key):
                    self._keep_reused([kept.block])
                else:
                    taken.append(self._evict(kept))
            elif first is not None:
                if num_listed := self._num_leaving(wanted, 0 if surplus else inf, kept):
                    taken += super().popleft_n(num_listed, *args, **kwargs)
                else:
                    self._keep_first(first, kept)
            elif self._reused.num_free_blocks:
                taken += self._pop_reused(wanted, inf)
            else:
                assert kept is not None
                self._take_aside(kept)
                taken.append(self._evict(kept))
        return taken

    def remove(self, block: KVCacheBlock, *args: Any, **kwargs: Any) -> None:
        """Takes a free block that is used again; raises a RuntimeError if it is not free."""
        kept = self._aside.get(block)
        if kept is not None:
            self._take_aside(kept)
        else:
            self._take_out(block)

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

    def how_kept(self, block: KVCacheBlock) -> int:
        """Of a free block: 2 if a waiting request needs it, 1 if several have used it, else 0."""
        if block.block_hash in self._needed:
            return 2
        is_reused = block.block_hash is not None and self._reuse.is_reused(block.block_hash)
        return int(is_reused or self._is_in_reused[block.block_id])

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """What a new walk shows; only tests call it in vLLM."""
        return list(self.iter_blocks_after(None))

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
            _unlink(self._mark)
            _unlink(self._mark_of_reused)
            self._passed_at = {}
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
        listed = self._next_listed(self, self._mark)
        kept = self._aside.first_ahead()
        if kept is not None and kept.place[0] == 0 and self._leaves_before(kept, listed):
            return kept.block
        if listed is None:
            listed = self._next_listed(self._reused, self._mark_of_reused)
            kept = self._aside.first_ahead()
        return kept.block if listed is None and kept is not None else listed

    def _next_listed(self, queue: FreeKVCacheBlockQueue, mark: KVCacheBlock) -> KVCacheBlock | None:
        """The first block of a list behind a mark that is not passed. Those between that are needed
        are set aside."""
        while True:
            before = queue.fake_free_list_head if _is_alone(mark) else mark
            block = before.next_free_block
            assert block is not None
            if block is queue.fake_free_list_tail:
                return None
            if block.block_hash in self._needed:
                self._set_aside(block)
            elif self._is_passed(block):
                _unlink(mark)
                _link_behind(block, mark)
            else:
                return block

    def _pass_shown(self) -> None:
        if self._shown is None:
            return
        block, freed_at = self._shown
        self._passed, self._shown = block, None
        if self._freed_at[block.block_id] != freed_at:
            return  # it was taken and freed again
        self._passed_at[block.block_id] = freed_at
        kept = self._aside.get(block)
        if kept is not None:
            self._aside.pass_over(kept)
        elif not _is_alone(block) and not self._is_in_reused[block.block_id]:
            _unlink(self._mark)
            _link_behind(block, self._mark)

    def _is_passed(self, block: KVCacheBlock) -> bool:
        return self._passed_at.get(block.block_id) == self._freed_at[block.block_id]

    def _surplus(self) -> int:
        """How many reused blocks leave before other cached ones: those that are too many, and at
        least one if they have lost their hashes, as all do at once."""
        if not self._reused.num_free_blocks:
            return 0
        surplus = max(0, self._reused.num_free_blocks - self._reuse.room_blocks)
        first = _first_of(self._reused, self._mark_of_reused)
        return max(surplus, int(first is not None and first.block_hash is None))

    def _pop_reused(self, n: int, most: float) -> list[KVCacheBlock]:
        """The first reused blocks, `n` at most, or `most` with those between that are needed: these
        are set aside."""
        needed, reused = self._needed, self._reused
        taken: list[KVCacheBlock] = []
        while len(taken) < n and most > 0:
            block = first = _first_of(reused, self._mark_of_reused)
            keys: list[bytes] = []
            num_leaving, num_wanted = 0, min(n - len(taken), most)
            while block is not None and block.block_id != -1 and num_leaving < num_wanted:
                key = block.block_hash
                if key is not None:
                    if key in needed:
                        break
                    keys.append(key)
                num_leaving += 1
                block = block.next_free_block
            if num_leaving:
                taken += reused.popleft_n(num_leaving)
                self.evicted_blocks["unused"] += len(keys)
                self._reuse.on_evict(keys, True)
                most -= num_leaving
            elif first is not None:
                self._set_aside(first)
                most -= 1
            else:
                break
        for block in taken:
            self._is_in_reused[block.block_id] = False
        self.num_free_blocks -= len(taken)
        return taken

    def _num_leaving(self, n: int, most_cached: float, kept: KeptBlock | None) -> int:
        """How many blocks leave at the head of the list, `n` at most and `most_cached` cached ones,
        before one that is kept there or the one that is set aside."""
        needed, (new, old) = self._needed, self._reuse.reused
        mark, tail, freed_at, before = self._mark, self.fake_free_list_tail, self._freed_at, inf
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
                    or len(keys) == most_cached
                    or key in needed
                ):
                    break
                keys.append(key)
            num_leaving += 1
            block = block.next_free_block
        self.evicted_blocks["unused"] += len(keys)
        self._reuse.on_evict(keys, False)
        return num_leaving

    def _keep_first(self, first: KVCacheBlock, kept: KeptBlock | None) -> None:
        """Keep the first block of the list, which is needed or reused, and those behind it that are
        the same, reused ones as far as there is room."""
        needed, (new, old) = self._needed, self._reuse.reused
        before = kept.freed_at if kept is not None and kept.place[0] == 0 else inf
        is_needed = first.block_hash in needed
        most = self._reuse.room_blocks + 1 - self._reused.num_free_blocks
        kept_blocks: list[KVCacheBlock] = []
        block: Any = first
        while is_needed or len(kept_blocks) < most:
            key = block.block_hash
            if (
                key is None  # as of the mark and the end of the list
                or (key in needed) != is_needed
                or not (is_needed or key in new or key in old)
                or self._freed_at[block.block_id] > before
            ):
                break
            kept_blocks.append(block)
            block = block.next_free_block
        if is_needed:
            for block in kept_blocks:
                self._set_aside(block)
        else:
            self._keep_reused(super().popleft_n(len(kept_blocks)))

    def _keep_reused(self, blocks: list[KVCacheBlock]) -> None:
        self._reused.append_n(blocks)
        self.num_free_blocks += len(blocks)
        for block in blocks:
            self._is_in_reused[block.block_id] = True

    def _take_out(self, block: KVCacheBlock) -> None:
        """Take a block out of its list."""
        if self._is_in_reused[block.block_id]:
            self._reused.remove(block)
            self._is_in_reused[block.block_id] = False
            self.num_free_blocks -= 1
        else:
            super().remove(block)

    def _set_aside(self, block: KVCacheBlock) -> None:
        """Take a cached block out of its list, to be kept."""
        assert block.block_hash is not None
        self._take_out(block)
        freed_at, is_passed = self._freed_at[block.block_id], self._is_passed(block)
        self._aside.add(KeptBlock(block, block.block_hash, freed_at, is_passed))
        self.num_free_blocks += 1

    def _evict(self, kept: KeptBlock) -> KVCacheBlock:
        """The block, which is set aside no more, is given to a request."""
        if kept.is_cached:
            is_last = not self._aside.num_copies(kept.key)
            is_needed = is_last and self._next_use(kept.key) is not None
            self.evicted_blocks["needed" if is_needed else "unused"] += 1
            if is_last and not is_needed:
                self._reuse.on_evict([kept.key], False)
        return kept.block

    def _first_aside(self) -> KeptBlock | None:
        """The first of those that are set aside.

        vLLM resets all hashes at once, so this one tells; then those that lost theirs leave with
        blocks that are not cached. Where it evicts single blocks, they leave in their turn.
        """
        first = self._aside.first() if self._aside else None
        if first is None or first.is_cached:
            return first
        uncached = [kept for kept in self._aside if not kept.is_cached]
        for kept in uncached:
            self._take_aside(kept)
        super().prepend_n([kept.block for kept in uncached])
        return self._aside.first()

    def _take_aside(self, kept: KeptBlock) -> None:
        self._aside.remove(kept)
        self.num_free_blocks -= 1

    def _leaves_before(self, kept: KeptBlock, block: KVCacheBlock | None) -> bool:
        """Whether one that is set aside, and not needed, has its turn before that of the list."""
        if block is None:
            return True
        return block.block_hash is not None and kept.freed_at < self._freed_at[block.block_id]

    def _place(self, kept: KeptBlock) -> Place:
        rank = self._next_use(kept.key)
        if rank is None:
            return (0, kept.freed_at)
        return (1, *(-each for each in rank), -kept.depth_tokens, kept.freed_at)

    def _number(self, blocks: list[KVCacheBlock]) -> None:
        freed_at = self._freed_at
        for number, block in enumerate(blocks, self._num_freed):
            freed_at[block.block_id] = number
        self._num_freed += len(blocks)

    def _on_remove(self, chains: Chains, runs: bool) -> None:
        keys = chains[0] if len(chains) == 1 else [key for chain in chains for key in chain]
        if runs:
            self._reuse.on_use(keys)
        self._aside.rank_again(keys)


def _first_of(queue: FreeKVCacheBlockQueue, mark: KVCacheBlock) -> KVCacheBlock | None:
    """The first block of a list. A mark before it says nothing, and is taken out."""
    first = queue.fake_free_list_head.next_free_block
    if first is mark:
        _unlink(mark)
        first = queue.fake_free_list_head.next_free_block
    return None if first is queue.fake_free_list_tail else first


def _link_behind(block: KVCacheBlock, mark: KVCacheBlock) -> None:
    behind = block.next_free_block
    assert behind is not None
    mark.prev_free_block, mark.next_free_block = block, behind
    block.next_free_block = behind.prev_free_block = mark


def _unlink(mark: KVCacheBlock) -> None:
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
