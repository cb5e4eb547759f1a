# SPDX-License-Identifier: Apache-2.0
"""Which blocks are used again, as far as the past tells, and how much room they deserve."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

HISTORY_CACHES = 8
MAX_HISTORY_KEYS = 1 << 17
"""To forget half of them takes about a millisecond."""
FIRST_SHARE = 0.1


class Reuse:
    """Blocks that several requests have used may stay when it would be their turn to leave: up to
    `room_blocks` of them.

    The room is adapted as in ARC (Megiddo and Modha, FAST 2003, section III): it grows with every
    use of a reused block that has left lately, and shrinks with every use of one that had been used
    once. Unlike there, uses are remembered longer than what has left lately is: a system prompt may
    come back after many caches full of other prompts.

    Args:
        cache_blocks: of the block pool. Of up to `HISTORY_CACHES` times as many keys it is known
            whether they were used, of `MAX_HISTORY_KEYS` at most.
    """

    def __init__(self, cache_blocks: int) -> None:
        self._cache_blocks = cache_blocks
        self._room_blocks = FIRST_SHARE * cache_blocks
        history_keys = min(HISTORY_CACHES * cache_blocks, MAX_HISTORY_KEYS)
        self._used, self._reused = _Recent(history_keys), _Recent(history_keys)
        left_keys = min(cache_blocks, MAX_HISTORY_KEYS)
        self._left = {reused: _Recent(left_keys) for reused in (False, True)}

    @property
    def room_blocks(self) -> int:
        """How many reused blocks may stay."""
        return int(self._room_blocks)

    @property
    def reused(self) -> tuple[Set[bytes], Set[bytes]]:
        """The keys of blocks that two requests have used, in one of two sets, until the next use
        of any block."""
        return self._reused.new, self._reused.old

    def is_reused(self, key: bytes) -> bool:
        """Whether two requests have used a block."""
        return key in self._reused.new or key in self._reused.old

    def on_use(self, keys: Sequence[bytes]) -> None:
        """A request that needs these blocks is admitted."""
        for is_reused, left in self._left.items():
            if back := left.known(keys):
                others = len(self._left[not is_reused])
                blocks = len(back) * max(1.0, others / len(left))
                room_blocks = self._room_blocks + (blocks if is_reused else -blocks)
                self._room_blocks = min(max(room_blocks, 0.0), float(self._cache_blocks))
                left.forget(back)
        self._reused.add(self._used.known(keys))
        self._used.add(keys)

    def on_evict(self, keys: Iterable[bytes], is_reused: bool) -> None:
        """These blocks are given to a request, and no waiting one needs them. Nobody asks whether
        another block has the same key: few have."""
        self._left[is_reused].add(keys)


class _Recent:
    """The keys that were added last: between half of `max_keys` and these, and what is added at a
    time more."""

    def __init__(self, max_keys: int) -> None:
        self._generation_keys = max(1, max_keys // 2)
        self.new: set[bytes] = set()
        self.old: set[bytes] = set()

    def __len__(self) -> int:
        return len(self.new) + len(self.old)

    def known(self, keys: Sequence[bytes]) -> set[bytes]:
        known = self.new.intersection(keys)
        if not self.old.isdisjoint(keys):
            known |= self.old.intersection(keys)
        return known

    def add(self, keys: Iterable[bytes]) -> None:
        self.new.update(keys)
        if len(self.new) >= self._generation_keys:
            self.old, self.new = self.new, set()

    def forget(self, keys: Set[bytes]) -> None:
        self.new -= keys
        self.old -= keys
