# SPDX-License-Identifier: Apache-2.0
"""A bounded amount of memory for what is read of stored contexts, in place of the page cache.

What is not in use is kept until the room is needed. Then values go first, keys next, and indexes
last: a query walks the index and looks at many keys, but takes the values of few.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from vllm_relay.sparse.files.section_table import PAGE_CLASSES

POLL_S = 0.02  # a lease ends where Python lets go of an array, which cannot notify


class BufferPoolFullError(RuntimeError):
    """What is in use leaves no room for what is asked for."""


@dataclass
class BufferPoolStats:
    """Since the pool was made; `held_bytes` and `pinned_bytes` are those of now.

    Attributes:
        hits, misses: requests that found their bytes in the pool, and those that read them.
        read_bytes: that were read from files.
        evictions: entries that made room.
        held_bytes: in the pool, of which `pinned_bytes` are in use.
    """

    hits: int = 0
    misses: int = 0
    read_bytes: int = 0
    evictions: int = 0
    held_bytes: int = 0
    pinned_bytes: int = 0


_Key = tuple[Hashable, Hashable]  # owner, and which of its bytes


@dataclass
class _Entry:
    key: _Key
    buffer: memoryview
    page_class: str
    pins: int = 1
    leases: int = 0  # of the pins
    is_loaded: bool = False
    is_kept: bool = True  # False: its file is gone, so it goes when it is no longer in use

    @property
    def num_bytes(self) -> int:
        return len(self.buffer)


class BufferPool:
    """Pages and sections of files, at most `limit_bytes` of them. For any number of threads.

    Args:
        limit_bytes: of everything the pool holds, in use or not.
        empty: makes its memory, as numpy.empty.

    Raises:
        ValueError: the limit is not positive.
    """

    def __init__(self, limit_bytes: int, *, empty: Callable[..., np.ndarray] = np.empty) -> None:
        if isinstance(limit_bytes, bool) or not isinstance(limit_bytes, int) or limit_bytes < 1:
            raise ValueError(f"limit_bytes is {limit_bytes!r}, expected a whole number >= 1")
        self.limit_bytes = limit_bytes
        self._empty = empty
        self._stats = BufferPoolStats()
        self._entries: dict[_Key, _Entry] = {}
        # of those that nobody uses, by class, least recently used first
        self._idle: dict[str, OrderedDict[_Key, None]] = {
            page_class: OrderedDict() for page_class in PAGE_CLASSES
        }
        # left for the next call by finalizers, which may run inside any line of any thread
        self._ended_leases: deque[_Entry] = deque()
        self._dropped_owners: deque[Hashable] = deque()
        self._condition = threading.Condition()
        self._pinned_here = threading.local()
        self._leased_bytes = 0

    @property
    def stats(self) -> BufferPoolStats:
        with self._condition:
            self._apply_changes()
            return replace(self._stats)

    @contextmanager
    def pinned(
        self,
        owner: Hashable,
        key: Hashable,
        num_bytes: int,
        page_class: str,
        load: Callable[[memoryview], None],
    ) -> Iterator[np.ndarray]:
        """The bytes `key` of `owner` as read-only uint8 [num_bytes], valid inside the `with` block.

        Waits while other threads use the room. A thread may have one block at a time: two that each
        hold one and wait for another would wait forever.

        Args:
            load: fills the memory where the bytes are not in the pool; may raise.

        Raises:
            BufferPoolFullError: no room, and no other thread will give any back.
            RuntimeError: this thread is in such a block already.
        """
        self._refuse_waiting_for_itself()
        self._pinned_here.value = True
        try:
            entry = self._pin((owner, key), num_bytes, page_class, load, is_lease=False)
            try:
                yield np.frombuffer(entry.buffer.toreadonly(), np.uint8)
            finally:
                with self._condition:
                    self._unpin(entry)
        finally:
            self._pinned_here.value = False

    def lease(
        self,
        owner: Hashable,
        key: Hashable,
        num_bytes: int,
        page_class: str,
        load: Callable[[memoryview], None],
    ) -> np.ndarray:
        """As `pinned`, but in use for as long as the array, or a view of it, lives."""
        self._refuse_waiting_for_itself()
        entry = self._pin((owner, key), num_bytes, page_class, load, is_lease=True)
        # views of views keep this array alive, since what lies below it is no array
        array = np.frombuffer(entry.buffer.toreadonly(), np.uint8)
        weakref.finalize(array, self._ended_leases.append, entry).atexit = False
        return array

    def drop(self, owner: Hashable) -> None:
        """Lets go of what belongs to `owner`: now, or when it is no longer in use. May be called
        from a finalizer; takes effect with the next call."""
        self._dropped_owners.append(owner)

    def _refuse_waiting_for_itself(self) -> None:
        if getattr(self._pinned_here, "value", False):
            raise RuntimeError("this thread uses a page of the pool already; one at a time")

    def _pin(
        self,
        key: _Key,
        num_bytes: int,
        page_class: str,
        load: Callable[[memoryview], None],
        *,
        is_lease: bool,
    ) -> _Entry:
        with self._condition:
            entry = self._wait_for_entry(key, num_bytes, is_lease)
            if entry is not None:
                self._stats.hits += 1
                return entry
            entry = _Entry(key, self._empty((num_bytes,), np.uint8).data, page_class)
            self._entries[key] = entry
            self._stats.held_bytes += num_bytes
            self._stats.pinned_bytes += num_bytes
            if is_lease:
                entry.leases = 1
                self._leased_bytes += num_bytes
        try:
            load(entry.buffer)
        except BaseException:
            with self._condition:
                entry.is_kept = False
                if is_lease:
                    self._end_lease(entry)
                else:
                    self._unpin(entry)
            raise
        with self._condition:
            entry.is_loaded = True
            self._stats.misses += 1
            self._stats.read_bytes += num_bytes
            self._condition.notify_all()
        return entry

    def _wait_for_entry(self, key: _Key, num_bytes: int, is_lease: bool) -> _Entry | None:
        """The entry, pinned, or None when there is room for it."""
        while True:
            self._apply_changes()
            entry = self._entries.get(key)
            if entry is not None and entry.is_loaded:
                self._pin_again(entry, is_lease)
                return entry
            if entry is None and self._make_room(num_bytes):
                return None
            if entry is None and self._leased_bytes + num_bytes > self.limit_bytes:
                raise BufferPoolFullError(
                    f"{num_bytes} bytes asked for, {self._leased_bytes} of {self.limit_bytes} are "
                    "in use by arrays: let go of some, or give the pool a larger limit_bytes"
                )
            self._condition.wait(POLL_S)

    def _pin_again(self, entry: _Entry, is_lease: bool) -> None:
        if entry.pins == 0:
            del self._idle[entry.page_class][entry.key]
            self._stats.pinned_bytes += entry.num_bytes
        entry.pins += 1
        if is_lease:
            self._leased_bytes += entry.num_bytes if entry.leases == 0 else 0
            entry.leases += 1

    def _unpin(self, entry: _Entry) -> None:
        entry.pins -= 1
        if entry.pins == 0:
            self._stats.pinned_bytes -= entry.num_bytes
            if entry.is_kept:
                self._idle[entry.page_class][entry.key] = None
            else:
                self._remove(entry)
            self._condition.notify_all()

    def _end_lease(self, entry: _Entry) -> None:
        entry.leases -= 1
        self._leased_bytes -= entry.num_bytes if entry.leases == 0 else 0
        self._unpin(entry)

    def _make_room(self, num_bytes: int) -> bool:
        if self._stats.pinned_bytes + num_bytes > self.limit_bytes:
            return False
        for page_class in PAGE_CLASSES:
            idle = self._idle[page_class]
            while idle and self._stats.held_bytes + num_bytes > self.limit_bytes:
                key, _ = idle.popitem(last=False)
                self._remove(self._entries[key])
                self._stats.evictions += 1
        return True

    def _remove(self, entry: _Entry) -> None:
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
        self._stats.held_bytes -= entry.num_bytes

    def _apply_changes(self) -> None:
        while self._ended_leases:
            self._end_lease(self._ended_leases.popleft())
        while self._dropped_owners:
            owner = self._dropped_owners.popleft()
            for key in [key for key in self._entries if key[0] == owner]:
                entry = self._entries[key]
                entry.is_kept = False
                if entry.pins == 0:
                    del self._idle[entry.page_class][entry.key]
                    self._remove(entry)
