# SPDX-License-Identifier: Apache-2.0
"""Heaps with entries that are out of date: these leave when they come to the top, or when they
are more than half. So nothing is searched for in a heap, and it stays as small as what it holds."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from _typeshed import SupportsRichComparison

E = TypeVar("E", bound="SupportsRichComparison")
R = TypeVar("R", bound=Hashable)

_MIN_SIZE = 64


def push(heap: list[E], entry: E, is_current: Callable[[E], bool], num_current: int) -> None:
    """Add an entry.

    Args:
        is_current: whether an entry is not out of date; once it is, it stays so.
        num_current: how many are not, at least.
    """
    heappush(heap, entry)
    if len(heap) > _MIN_SIZE + 2 * num_current:
        heap[:] = filter(is_current, heap)
        heapify(heap)


def first(heap: list[E], is_current: Callable[[E], bool]) -> E | None:
    """The smallest entry that is current; None if there is none."""
    while heap:
        if is_current(heap[0]):
            return heap[0]
        heappop(heap)
    return None


class Ranked(Generic[R]):
    """A set whose first member is known: the one of the smallest rank, and of equal ranks the one
    that was added first."""

    __slots__ = ("_entries", "_heap", "_serial")

    def __init__(self) -> None:
        self._entries: dict[R, tuple[Any, int, R]] = {}
        self._heap: list[tuple[Any, int, R]] = []
        self._serial = count()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, member: R) -> bool:
        return member in self._entries

    def __iter__(self) -> Iterator[R]:
        """In the order in which they were added."""
        return iter(self._entries)

    def add(self, member: R, rank: Any) -> None:
        """Add a member, or give it another rank; with the rank it has it keeps its place."""
        known = self._entries.get(member)
        if known is not None and known[0] == rank:
            return
        entry = self._entries[member] = (rank, next(self._serial), member)
        push(self._heap, entry, self._is_current, len(self._entries))

    def discard(self, member: R) -> None:
        self._entries.pop(member, None)

    def rank(self, member: R) -> Any:
        return self._entries[member][0]

    def first(self) -> R | None:
        heap, entries = self._heap, self._entries
        while heap:  # as the function `first` does, without a call for every entry
            entry = heap[0]
            if entries.get(entry[2]) is entry:
                return entry[2]
            heappop(heap)
        return None

    def _is_current(self, entry: tuple[Any, int, R]) -> bool:
        return self._entries.get(entry[2]) is entry
