# SPDX-License-Identifier: Apache-2.0
"""Walks over the free blocks, as vLLM's lazy offload to the CPU does one in every step."""

from itertools import count, islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

from tests.prefix_cache.eviction.block_pool_traces import NUM_BLOCKS, Cache, actions, paths
from tests.prefix_cache.eviction.eviction_oracles import leaving_order
from tests.support.calls import count_calls
from tests.support.depth import cases
from vllm_relay.prefix_cache.eviction.free_queue import PolicyFreeQueue, make_free_queue
from vllm_relay.prefix_cache.eviction.next_use import NextUse
from vllm_relay.prefix_cache.eviction.reuse import Reuse

steps = st.lists(
    st.tuples(st.one_of(actions, st.just("walk")), st.integers(0, 9), paths),
    min_size=20,
    max_size=80,
)


class Offload:
    """Walks as vLLM does: it looks at one block more than it goes on from."""

    def __init__(self, queue):
        self.queue, self.cursor = queue, None

    def walk(self, number):
        blocks = []
        for covered, block in enumerate(self.queue.iter_blocks_after(self.cursor)):
            if covered >= number:
                break
            blocks.append(block)
            self.cursor = block
        return blocks


class Watched(PolicyFreeQueue):
    """Numbers the times at which blocks become free."""

    def __init__(self, *args):
        super().__init__(*args)
        self.numbers, self.stays = count(), {}

    def append_n(self, blocks):
        super().append_n(blocks)
        self.stays |= {block.block_id: next(self.numbers) for block in blocks}


def test_a_walk_shows_every_cached_block_once_in_the_order_of_now():
    num_shown = 0

    @settings(max_examples=cases(75))
    @given(steps, st.booleans())
    def check(steps, looks_ahead):
        nonlocal num_shown
        cache = Cache(lambda blocks, next_use: Watched(blocks, next_use, Reuse(0)))
        queue = cache.pool.free_block_queue
        offload, shown = Offload(queue), set()
        for action, number, path in steps:
            if action != "walk":
                cache.do((action, number, path), cache_late=True)
                continue
            if number == 9:
                offload.cursor = None
            if offload.cursor is None:
                shown.clear()
            # who takes none of what it is shown names a block twice that is freed anew meanwhile
            number = max(number, 1)
            ahead = [
                block
                for block in leaving_order(queue)
                if block.block_hash is not None and queue.stays[block.block_id] not in shown
            ]
            if looks_ahead:
                blocks = offload.walk(number)
            else:
                blocks = list(islice(queue.iter_blocks_after(offload.cursor), number))
                offload.cursor = blocks[-1] if blocks else offload.cursor
            found = [block for block in blocks if block.block_hash is not None]
            assert found == (ahead if len(blocks) < number else ahead[: len(found)])
            shown |= {queue.stays[block.block_id] for block in found}
            num_shown += len(found)

    check()
    assert num_shown > cases(100)


@settings(max_examples=cases(75))
@given(steps)
def test_a_walk_shows_every_cached_block_once_where_some_are_kept_for_their_uses(steps):
    cache = Cache(lambda blocks, next_use: Watched(blocks, next_use, Reuse(NUM_BLOCKS)))
    queue = cache.pool.free_block_queue
    queue._reuse._room_blocks = 3.0
    offload, shown = Offload(queue), set()
    for action, number, path in steps:
        if action != "walk":
            cache.do((action, number, path), cache_late=True)
            continue
        blocks = [block for block in offload.walk(max(number, 1)) if block.block_hash is not None]
        stays = [queue.stays[block.block_id] for block in blocks]
        assert shown.isdisjoint(stays)
        shown |= set(stays)
    blocks = [block for block in offload.walk(NUM_BLOCKS) if block.block_hash is not None]
    shown |= {queue.stays[block.block_id] for block in blocks}
    cached = [block for block in leaving_order(queue) if block.block_hash is not None]
    assert {queue.stays[block.block_id] for block in cached} <= shown


@settings(max_examples=cases(75))
@given(steps.map(lambda steps: [step for step in steps if step[0] != "wait"]))
def test_a_walk_by_lru_is_that_of_vllm(steps):
    stock = Cache(lambda blocks, next_use: FreeKVCacheBlockQueue(blocks))
    ours = [
        Cache(lambda blocks, next_use: PolicyFreeQueue(blocks, next_use, Reuse(0))),
        Cache(lambda blocks, next_use: make_free_queue("lru", next_use)(blocks)),
    ]
    caches = [stock, *ours]
    offloads = [Offload(cache.pool.free_block_queue) for cache in caches]
    for action, number, path in steps:
        if action == "walk":
            walks = [[b.block_id for b in offload.walk(number)] for offload in offloads]
            assert walks[0] == walks[1] == walks[2]
            continue
        for cache in caches:
            cache.do((action, number, path), cache_late=True)
        for offload in offloads:  # vLLM's would lose what is between two places of its cursor
            if offload.cursor is not None and offload.cursor.ref_cnt:
                offload.cursor = None


def free_blocks(number, needed):
    next_use = NextUse()
    queue = make_free_queue("queue", next_use)([KVCacheBlock(index) for index in range(number)])
    keys = [b"%d" % index for index in range(number)]
    for block, key in zip(queue.popleft_n(number), keys, strict=True):
        block.set_block_hash(key, 16)
        queue.append(block)
    for index in range(0, number, needed):
        next_use.add((index,), [[keys[index]]])
    return queue


@pytest.mark.parametrize("needed", [1, 2, 10**9])
def test_a_walk_costs_what_it_shows(needed):
    def calls(number):
        queue = free_blocks(number, needed)
        list(queue.iter_blocks_after(None))  # every block is set aside once
        offload = Offload(queue)
        offload.walk(1)
        offload.cursor = None

        def walk():
            for _ in range(10):
                assert len(offload.walk(8)) == 8
                assert len(offload.walk(8)) == 8
                offload.cursor = None

        return count_calls(walk)

    assert calls(10_000) <= 1.5 * calls(500)


def test_a_walk_from_a_block_in_the_middle():
    queue = free_blocks(9, needed=3)
    order = leaving_order(queue)
    for index, block in enumerate(order):
        assert list(queue.iter_blocks_after(block)) == order[index + 1 :]
    assert list(queue.iter_blocks_after(queue.popleft())) == []


def test_a_walk_goes_on_where_it_was_when_what_it_showed_last_is_freed_anew():
    queue = free_blocks(4, needed=10**9)
    first = leaving_order(queue)[0]
    assert next(queue.iter_blocks_after(None)) is first
    queue.remove(first)
    queue.append(first)
    order = leaving_order(queue)
    assert order[0] is not first and first in order
    assert list(queue.iter_blocks_after(first)) == order
