# SPDX-License-Identifier: Apache-2.0
"""Which cached blocks the waiting requests will need, and how soon."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush


class NextUse:
    """For each block key, the positions in the queue of the waiting requests that need the block.

    Positions are unique among the waiting requests, in any order, and may be used again once they
    are removed. The smaller the position, the sooner the request runs. A key names what a block
    holds.
    """

    def __init__(self) -> None:
        self._positions: dict[bytes, int | _Positions] = {}
        self._waiting: set[int] = set()
        self._listeners: list[Callable[[Iterable[bytes]], None]] = []

    def __len__(self) -> int:
        """How many requests wait."""
        return len(self._waiting)

    def listen(self, on_change: Callable[[Iterable[bytes]], None]) -> None:
        """Calls `on_change` after every `add` and `remove`, with the keys these were given."""
        self._listeners.append(on_change)

    def add(self, position: int, keys: Sequence[bytes]) -> None:
        """A request waits.

        Args:
            position: its place in the queue.
            keys: those of the blocks it needs, each once.

        Raises:
            ValueError: a request waits at this position already.
        """
        if position in self._waiting:
            raise ValueError(f"a request waits at position {position} already: remove it first")
        self._waiting.add(position)
        positions = self._positions
        for key in keys:
            known = positions.setdefault(key, position)
            if isinstance(known, _Positions):
                known.add(position)
            elif known != position:
                positions[key] = _Positions(known, position)
        self._tell(keys)

    def remove(self, position: int, keys: Sequence[bytes]) -> None:
        """A request waits no longer.

        Args:
            position: what `add` was given.
            keys: the same as `add` was given.

        Raises:
            KeyError: no request waits at this position, or nobody waits for one of the keys.
        """
        self._waiting.remove(position)
        positions = self._positions
        for key in keys:
            known = positions[key]
            if isinstance(known, _Positions):
                known.remove(position)
                if len(known) == 1:
                    positions[key] = known.first
            elif known == position:
                del positions[key]
            else:
                raise KeyError(f"position {position} does not wait for key {key.hex()}")
        self._tell(keys)

    def next_use(self, key: bytes) -> int | None:
        """The smallest position of a request that needs the block; None if nobody waits for it."""
        known = self._positions.get(key)
        return known.first if isinstance(known, _Positions) else known

    def _tell(self, keys: Sequence[bytes]) -> None:
        for on_change in self._listeners:
            on_change(keys)


class _Positions:
    """Two or more positions of one key: a heap from which positions are removed late."""

    __slots__ = ("_heap", "_removed")

    def __init__(self, *positions: int) -> None:
        self._heap = sorted(positions)
        self._removed: set[int] = set()  # still in the heap, but never at its top

    def __len__(self) -> int:
        return len(self._heap) - len(self._removed)

    @property
    def first(self) -> int:
        return self._heap[0]

    def add(self, position: int) -> None:
        if position in self._removed:
            self._removed.remove(position)
        else:
            heappush(self._heap, position)

    def remove(self, position: int) -> None:
        heap, removed = self._heap, self._removed
        if position != heap[0]:
            removed.add(position)
            if 2 * len(removed) > len(heap):
                heap[:] = [kept for kept in heap if kept not in removed]
                heapify(heap)
                removed.clear()
            return
        heappop(heap)
        while heap and heap[0] in removed:
            removed.remove(heappop(heap))
