# SPDX-License-Identifier: Apache-2.0

import numpy as np
import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

from benchmarks.prefix_cache.bench_eviction import (
    admit,
    build_pool,
    cache_sizes,
    random_workload,
    run_in_order,
)
from tests.prefix_cache.eviction.eviction_oracles import leaving_order
from tests.support.calls import count_calls
from vllm_relay.prefix_cache.eviction.belady import NEVER, belady_hits
from vllm_relay.prefix_cache.eviction.free_queue import (
    PolicyFreeQueue,
    StockFreeQueue,
    make_free_queue,
)
from vllm_relay.prefix_cache.eviction.next_use import NextUse
from vllm_relay.prefix_cache.eviction.reuse import Reuse

POLICIES = ["queue", "lru"]


def make_blocks(number):
    return [KVCacheBlock(block_id) for block_id in range(number)]


def ids(blocks):
    return [block.block_id for block in blocks]


def key(name):
    return name.encode() + bytes(4)


def cached(blocks, *names):
    """Gives blocks the hashes of a chain, and returns them as they are freed."""
    for index, (block, name) in enumerate(zip(blocks, names, strict=True)):
        block.set_block_hash(key(name), 16 * (index + 1))
    return blocks[::-1]


def test_a_policy_leaves_no_method_to_vllms_list_alone():
    """What is set aside is not in it."""
    methods = {name for name in vars(FreeKVCacheBlockQueue) if not name.startswith("_")}
    assert methods and methods <= set(vars(PolicyFreeQueue))


@pytest.mark.parametrize("name", POLICIES)
def test_uncached_blocks_leave_first_and_the_last_freed_before_all(name):
    queue = make_free_queue(name, NextUse())(make_blocks(8))
    assert queue.num_free_blocks == 8
    assert queue.popleft().block_id == 0
    taken = queue.popleft_n(5)
    assert ids(taken) == [1, 2, 3, 4, 5] and queue.num_free_blocks == 2
    queue.append_n(cached(taken[:2], "a", "ab"))
    queue.prepend_n(taken[2:4])
    queue.prepend_n(taken[4:])
    assert ids(leaving_order(queue)) == [5, 3, 4, 6, 7, 2, 1]
    assert ids(queue.iter_blocks_after(taken[3])) == [6, 7, 2, 1]
    assert ids(queue.iter_blocks_after(taken[0])) == []
    queue.remove(taken[1])
    queue.remove(taken[3])
    assert queue.num_free_blocks == 5
    assert ids(queue.popleft_n(5)) == [5, 3, 6, 7, 1]
    assert queue.popleft_n(0) == [] and queue.num_free_blocks == 0
    assert queue.evicted_blocks == {"unused": 1, "needed": 0}
    with pytest.raises(ValueError, match="No free blocks"):
        queue.popleft()
    with pytest.raises(RuntimeError):
        queue.remove(taken[1])


@pytest.mark.parametrize("name", POLICIES)
def test_more_blocks_than_are_free(name):
    queue = make_free_queue(name, NextUse())(make_blocks(2))
    with pytest.raises(AssertionError):
        queue.popleft_n(3)


@pytest.mark.parametrize("name", POLICIES)
def test_evictions_are_counted_by_reason(name):
    next_use = NextUse()
    queue = make_free_queue(name, next_use)(make_blocks(4))
    queue.append_n(cached(queue.popleft_n(4), "a", "ab", "abc", "abcd"))
    next_use.add((1,), [[key("a"), key("ab")]])
    queue.popleft_n(3)
    assert queue.evicted_blocks == {"unused": 2, "needed": 1}


def test_vllms_own_queue_serves_lru():
    queue = make_free_queue("lru", NextUse())(make_blocks(2))
    changed = {"__init__", "popleft", "popleft_n"}  # to count
    assert isinstance(queue, FreeKVCacheBlockQueue)
    overridden = set(vars(StockFreeQueue)) & set(vars(FreeKVCacheBlockQueue))
    assert {name for name in overridden if callable(getattr(queue, name))} <= changed | {
        "__class__"
    }


def test_a_reset_of_the_prefix_cache_forgets_all_blocks():
    next_use = NextUse()
    pool = build_pool("queue", next_use, 12)
    chains = [[b"%d" % request, b"%d." % request] for request in range(5)]
    keys = [[block + bytes(4) for block in chain] for chain in chains]
    next_use.add((0,), keys[:1])
    for chain, chain_keys in zip(chains, keys, strict=True):
        pool.free_blocks(reversed(admit(pool, chain, chain_keys)[0]))
    assert pool.reset_prefix_cache()
    pool.free_blocks(reversed(admit(pool, chains[1], keys[1])[0]))
    pool.get_new_blocks(10)
    assert pool.free_block_queue.evicted_blocks == {"unused": 0, "needed": 0}
    assert admit(pool, chains[1], keys[1])[1] == 2


def test_evicted_hashes_are_no_evictions():
    pool = build_pool("queue", NextUse(), 4)
    blocks, _ = admit(pool, [b"a", b"b"], [key("a"), key("b")])
    pool.free_blocks(reversed(blocks))
    pool.evict_blocks(set(ids(blocks)))
    pool.get_new_blocks(4)
    assert pool.free_block_queue.evicted_blocks == {"unused": 0, "needed": 0}


@pytest.mark.parametrize("lose", ["reset", "evict"])
def test_blocks_that_lost_their_hashes_leave_when_all_were_set_aside(lose):
    next_use = NextUse()
    pool = build_pool("queue", next_use, 2)
    names = [b"a", b"b"]
    keys = [name + bytes(4) for name in names]
    blocks, _ = admit(pool, names, keys)
    pool.free_blocks(reversed(blocks))
    next_use.add((0,), [keys])
    assert list(pool.free_block_queue.iter_blocks_after(None)) == blocks[::-1]  # sets them aside
    if lose == "reset":
        assert pool.reset_prefix_cache()
    else:
        pool.evict_blocks(set(ids(blocks)))
    assert sorted(ids(pool.get_new_blocks(2))) == sorted(ids(blocks))


def test_of_equals_the_deepest_leaves_first_where_no_chain_is_known():
    next_use = NextUse()
    next_use.add((0,), [[key("a"), key("ab"), key("abc")]])
    queue = make_free_queue("queue", next_use)(make_blocks(3))
    queue.append_n(cached(queue.popleft_n(3), "a", "ab", "abc")[::-1])
    assert ids(queue.popleft_n(3)) == [2, 1, 0]


def test_blocks_return_to_their_place_when_waiting_requests_come_and_go():
    next_use = NextUse()
    queue = make_free_queue("queue", next_use)(make_blocks(3))
    blocks = queue.popleft_n(3)
    for block, name in zip(blocks, "abc", strict=True):
        queue.append_n(cached([block], name))
    for position in range(1000):
        next_use.add((position,), [[key("a")]])
        assert ids(queue.iter_blocks_after(None)) == [1, 2, 0]  # sets the block aside
        assert ids(leaving_order(queue)) == [1, 2, 0]
        next_use.remove((position,), runs=False)
        assert ids(queue.iter_blocks_after(None)) == [0, 1, 2]
        assert ids(leaving_order(queue)) == [0, 1, 2]
    assert all(len(each._heap) < 100 for each in queue._aside._ranked.values())
    assert ids(queue.popleft_n(3)) == [0, 1, 2]


@pytest.mark.parametrize("seed", range(20))
def test_queue_is_as_good_as_belady_when_it_knows_all_requests(seed):
    chains = random_workload(seed, 150)
    for capacity_blocks in cache_sizes(chains):
        hits = {name: run_in_order(name, chains, capacity_blocks) for name in POLICIES}
        best = belady_hits(chains, capacity_blocks)
        assert best <= belady_hits(chains, NEVER)
        assert hits["queue"] == best
        assert all(hits[name] <= best for name in POLICIES)


def test_a_short_queue_is_better_than_none():
    chains = random_workload(1, 600)
    for capacity_blocks in cache_sizes(chains)[:3]:
        lru = run_in_order("lru", chains, capacity_blocks)
        none = run_in_order("queue", chains, capacity_blocks, waiting_requests=0)
        short = run_in_order("queue", chains, capacity_blocks, waiting_requests=32)
        assert lru < none < short < run_in_order("queue", chains, capacity_blocks)


@pytest.mark.parametrize("name", POLICIES)
def test_a_prompt_costs_few_calls_for_every_block(name):
    num_blocks, next_use = 4096, NextUse()
    queue = make_free_queue(name, next_use)(make_blocks(num_blocks))
    keys = [key(f"{index}") for index in range(num_blocks)]
    queue.append_n(cached(queue.popleft_n(num_blocks), *map(str, range(num_blocks))))

    def wait_run_and_free():
        next_use.add((0,), [keys])
        next_use.remove((0,), runs=True)
        blocks = queue.popleft_n(num_blocks)
        queue.append_n(blocks)

    assert count_calls(wait_run_and_free) < 6 * num_blocks


def test_blocks_without_room_are_not_kept_before_it_is_their_turn():
    next_use, reuse = NextUse(), Reuse(4)
    queue = PolicyFreeQueue(make_blocks(4), next_use, reuse)
    for _ in range(2):
        next_use.add((0,), [[key(name)] for name in "abc"])
        next_use.remove((0,), runs=True)
    reuse._room_blocks = 0.0
    for block, name in zip(queue.popleft_n(4), "abcx", strict=True):
        queue.append_n(cached([block], name))
    assert queue.popleft().block_id == 0
    assert ids(queue.iter_blocks_after(None)) == [1, 2, 3]
    assert ids(queue.popleft_n(3)) == [1, 2, 3]


def test_reused_blocks_leave_in_their_order_though_one_was_needed_meanwhile():
    next_use, reuse = NextUse(), Reuse(3)
    queue = PolicyFreeQueue(make_blocks(3), next_use, reuse)
    for _ in range(2):
        next_use.add((0,), [[key(name)] for name in "abc"])
        next_use.remove((0,), runs=True)
    reuse._room_blocks = 3.0
    for block, name in zip(queue.popleft_n(3), "abc", strict=True):
        queue.append_n(cached([block], name))
    next_use.add((0,), [[key("b")]])
    assert ids(queue.iter_blocks_after(None)) == [0, 2, 1]  # sets the block aside
    next_use.remove((0,), runs=False)
    assert ids(queue.popleft_n(3)) == [0, 1, 2]


def test_blocks_that_are_needed_are_set_aside_together():
    num_blocks, next_use = 512, NextUse()
    queue = PolicyFreeQueue(make_blocks(num_blocks), next_use, Reuse(0))
    names = [str(index) for index in range(num_blocks)]
    queue.append_n(cached(queue.popleft_n(num_blocks), *names))
    next_use.add((0,), [list(map(key, names))])
    assert count_calls(lambda: queue.popleft_n(1)) < 40 * num_blocks  # one by one it would be 64


def test_a_block_that_is_needed_costs_nothing_for_those_behind_it():
    num_blocks, next_use = 4096, NextUse()
    queue = make_free_queue("queue", next_use)(make_blocks(num_blocks))
    queue.append_n(cached(queue.popleft_n(num_blocks), *map(str, range(num_blocks))))
    next_use.add((0,), [[key(str(num_blocks - 1))]])  # freed first
    assert count_calls(lambda: queue.popleft_n(1)) < 200
    assert queue.evicted_blocks == {"unused": 1, "needed": 0}


def test_a_million_blocks():
    next_use = NextUse()
    pool = build_pool("queue", next_use, 1_000_000)
    rng = np.random.default_rng(0)
    chain_blocks = 100
    for request in range(1000):  # 100,000 blocks
        start = int(rng.integers(100)) * 1000
        hashes = [b"%d" % (start + i) for i in range(50)]
        hashes += [b"%d.%d" % (request, i) for i in range(chain_blocks - 50)]
        keys = [block + bytes(4) for block in hashes]
        next_use.add((request,), [keys])
        blocks, _ = admit(pool, hashes, keys)
        pool.free_blocks(reversed(blocks))
    assert isinstance(pool, BlockPool) and isinstance(pool.free_block_queue, PolicyFreeQueue)
    assert pool.get_num_free_blocks() == 1_000_000
