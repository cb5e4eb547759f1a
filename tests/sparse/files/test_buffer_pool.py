# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
import threading
import time
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.depth import cases
from vllm_relay.sparse.files.buffer_pool import BufferPool, BufferPoolFullError
from vllm_relay.sparse.files.section_table import PAGE_CLASSES


class Source:
    """Fills memory with a number that depends on the key, and counts."""

    def __init__(self, pool: BufferPool) -> None:
        self.pool = pool
        self.loads = 0

    def read(self, key: int, page_class: str = "index", num_bytes: int = 10) -> np.ndarray:
        def load(buffer: memoryview) -> None:
            self.loads += 1
            buffer[:] = bytes([key]) * len(buffer)

        with self.pool.pinned(self, key, num_bytes, page_class, load) as data:
            assert data.tolist() == [key] * num_bytes
            assert not data.flags.writeable
            return data.copy()

    def lease(self, key: int, page_class: str = "index", num_bytes: int = 10) -> np.ndarray:
        def load(buffer: memoryview) -> None:
            self.loads += 1
            buffer[:] = bytes([key]) * len(buffer)

        return self.pool.lease(self, key, num_bytes, page_class, load)

    def is_held(self, key: int, num_bytes: int = 10) -> bool:
        before = self.loads
        self.read(key, num_bytes=num_bytes)
        return self.loads == before


def test_what_was_read_is_kept() -> None:
    pool = BufferPool(100)
    source = Source(pool)
    for _ in range(3):
        source.read(7)
    source.read(8)
    stats = pool.stats
    assert (stats.hits, stats.misses, stats.evictions) == (2, 2, 0)
    assert (stats.read_bytes, stats.held_bytes, stats.pinned_bytes) == (20, 20, 0)
    assert source.loads == 2


def test_values_go_first_then_keys_then_indexes() -> None:
    source = Source(BufferPool(60))
    for key, page_class in enumerate(["index", "values", "keys", "values", "keys", "index"]):
        source.read(key, page_class)
    gone = []
    for new in range(100, 106):
        source.read(new, "index")
        gone.append([key for key in range(6) if (source, key) not in source.pool._entries])
    assert gone == [[1], [1, 3], [1, 2, 3], [1, 2, 3, 4], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]]


@settings(max_examples=cases(50))
@given(
    limit=st.integers(1, 40),
    reads=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2)), max_size=80),
)
def test_equals_a_naive_model(limit: int, reads: list[tuple[int, int]]) -> None:
    """Key `k` of class `c` has k % 5 + 1 bytes."""
    pool = BufferPool(limit)
    source = Source(pool)
    held: list[OrderedDict[int, int]] = [OrderedDict() for _ in PAGE_CLASSES]
    misses = evictions = 0
    for key, page_class in reads:
        number, num_bytes = key * 3 + page_class, key % 5 + 1
        if num_bytes > limit:
            with pytest.raises(BufferPoolFullError):
                source.read(number, PAGE_CLASSES[page_class], num_bytes)
            continue
        if number in held[page_class]:
            held[page_class].move_to_end(number)
        else:
            misses += 1
            while sum(sum(each.values()) for each in held) + num_bytes > limit:
                next(each for each in held if each).popitem(last=False)
                evictions += 1
            held[page_class][number] = num_bytes
        source.read(number, PAGE_CLASSES[page_class], num_bytes)
        stats = pool.stats
        assert (stats.misses, stats.evictions) == (misses, evictions)
        assert stats.held_bytes == sum(sum(each.values()) for each in held) <= limit


def test_what_is_pinned_stays() -> None:
    source = Source(BufferPool(30))

    def load(buffer: memoryview) -> None:
        buffer[:] = b"v" * 10

    with source.pool.pinned(source, 200, 10, "values", load) as data:

        def others() -> None:
            for key in range(9):
                source.read(key)

        thread = threading.Thread(target=others)
        thread.start()
        thread.join()
        assert data.tobytes() == b"v" * 10
        assert source.pool.stats.pinned_bytes == 10
        with pytest.raises(RuntimeError, match="one at a time"):
            source.read(1)
        with pytest.raises(RuntimeError, match="one at a time"):
            source.lease(1)
    assert source.pool.stats.pinned_bytes == 0
    source.read(50)
    source.read(51)
    assert source.pool.stats.held_bytes == 30


def test_leases_last_as_long_as_views_of_their_arrays() -> None:
    pool = BufferPool(30)
    source = Source(pool)
    view = source.lease(1, num_bytes=20).view(np.uint16).reshape(5, 2)[2:].T
    gc.collect()
    assert pool.stats.pinned_bytes == 20
    with pytest.raises(BufferPoolFullError, match="20 bytes asked for, 20 of 30 are in use"):
        source.lease(2, num_bytes=20)
    with pytest.raises(BufferPoolFullError):
        source.read(2, num_bytes=11)
    assert (view == 0x0101).all()
    del view
    gc.collect()
    assert pool.stats.pinned_bytes == 0
    assert source.is_held(1, num_bytes=20)
    source.lease(2, num_bytes=20)


def test_leases_of_the_same_bytes_share_them() -> None:
    pool = BufferPool(30)
    source = Source(pool)
    first, second = source.lease(1), source.lease(1)
    assert np.shares_memory(first, second)
    assert pool.stats.pinned_bytes == 10
    del first
    gc.collect()
    assert pool.stats.pinned_bytes == 10
    del second
    gc.collect()
    assert pool.stats.pinned_bytes == 0


def test_a_thread_that_finds_no_room_waits_for_others() -> None:
    source = Source(BufferPool(10))
    is_pinned, may_go = threading.Event(), threading.Event()

    def hold() -> None:
        with source.pool.pinned(source, 1, 10, "keys", lambda buffer: None):
            is_pinned.set()
            may_go.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    is_pinned.wait()
    waiter = threading.Thread(target=source.read, args=(2,))
    waiter.start()
    time.sleep(0.05)
    assert waiter.is_alive() and source.loads == 0
    may_go.set()
    waiter.join()
    holder.join()
    assert source.loads == 1


def test_one_thread_loads_for_all() -> None:
    pool = BufferPool(100)
    loads: list[int] = []
    found: list[int] = []

    def load(buffer: memoryview) -> None:
        loads.append(1)
        time.sleep(0.05)
        buffer[:] = b"x" * 10

    def read() -> None:
        with pool.pinned("owner", "key", 10, "index", load) as data:
            found.append(int(data.sum()))

    threads = [threading.Thread(target=read) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loads) == 1
    assert found == [10 * ord("x")] * 5
    assert pool.stats.hits == 4


@pytest.mark.parametrize("how", ["pinned", "lease"])
def test_what_cannot_be_loaded_is_not_kept(how: str) -> None:
    pool = BufferPool(10)

    def fail(buffer: memoryview) -> None:
        buffer[:] = b"damaged..."
        raise OSError("disk")

    for _ in range(3):
        with pytest.raises(OSError, match="disk"):
            if how == "lease":
                pool.lease("owner", 1, 10, "index", fail)
            else:
                with pool.pinned("owner", 1, 10, "index", fail):
                    pass
    assert pool.stats.held_bytes == pool.stats.pinned_bytes == 0
    source = Source(pool)
    source.read(3)
    assert pool.stats.misses == 1


def test_what_an_owner_drops_goes_when_it_is_no_longer_in_use() -> None:
    pool = BufferPool(100)
    source, other = Source(pool), Source(pool)
    source.read(1)
    other.read(1)
    array = source.lease(2)
    pool.drop(source)
    assert pool.stats.held_bytes == 20
    assert array.tolist() == [2] * 10
    del array
    gc.collect()
    assert pool.stats.held_bytes == 10
    assert other.is_held(1)


def test_many_threads_stay_within_the_limit() -> None:
    pool = BufferPool(64)
    source = Source(pool)
    failures: list[BaseException] = []
    largest = [0]

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(300):
                key = int(rng.integers(0, 30))
                data = source.read(key, PAGE_CLASSES[key % 3], key % 16 + 1)
                assert (data == key).all()
                largest[0] = max(largest[0], pool.stats.held_bytes)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert 0 < largest[0] <= 64
    assert pool.stats.pinned_bytes == 0
    assert pool.stats.hits + pool.stats.misses == 1800


@pytest.mark.parametrize("limit", [0, -5, 1.5, True])
def test_odd_limits_are_refused(limit: object) -> None:
    with pytest.raises(ValueError, match="limit_bytes"):
        BufferPool(limit)
