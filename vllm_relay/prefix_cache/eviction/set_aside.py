# SPDX-License-Identifier: Apache-2.0
"""Free blocks that a policy keeps, in the order in which they leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from vllm_relay.ranked import first, push

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

Place = tuple[float, ...]
"""In the order in which free blocks leave; of one block alone."""


_Entry = tuple[Place, int]  # and block id


class KeptBlock:
    """A block that is set aside.

    Attributes:
        key: its hash when it was; the block may have lost it since.
        freed_at: how many blocks were freed before.
        place: as when it was ranked last.
        is_passed: whether the walk has come to it.
    """

    __slots__ = ("block", "depth_tokens", "freed_at", "is_passed", "key", "place")

    def __init__(self, block: KVCacheBlock, key: bytes, freed_at: int, is_passed: bool) -> None:
        self.block = block
        self.key = key
        self.depth_tokens = block.block_hash_num_tokens or 0
        self.freed_at = freed_at
        self.is_passed = is_passed
        self.place: Place = ()

    @property
    def is_cached(self) -> bool:
        return self.block.block_hash == self.key


class SetAside:
    """Blocks that leave in the order of their places, and a walk over them in the same order.

    Places are looked at again only where a block would be the next to leave, or when they are said
    to have become smaller.

    Args:
        place_of: where a block stands now.
    """

    def __init__(self, place_of: Callable[[KeptBlock], Place]) -> None:
        self._place_of = place_of
        self._kept: dict[int, KeptBlock] = {}  # by block id
        self._by_key: dict[bytes, list[KeptBlock]] = {}
        # by whether the walk has passed a block; entries are current where the place is the block's
        self._heaps: dict[bool, list[_Entry]] = {False: [], True: []}
        self._is_current = {each: partial(self._is_current_of, each) for each in (False, True)}

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[KeptBlock]:
        """In no order."""
        return iter(self._kept.values())

    def get(self, block: KVCacheBlock) -> KeptBlock | None:
        return self._kept.get(block.block_id)

    def num_copies(self, key: bytes) -> int:
        return len(self._by_key.get(key, ()))

    def add(self, kept: KeptBlock) -> None:
        self._kept[kept.block.block_id] = kept
        self._by_key.setdefault(kept.key, []).append(kept)
        self._rank(kept)

    def remove(self, kept: KeptBlock) -> None:
        del self._kept[kept.block.block_id]
        copies = self._by_key[kept.key]
        copies.remove(kept)
        if not copies:
            del self._by_key[kept.key]

    def rank_again(self, keys: Sequence[bytes]) -> None:
        """Blocks with these keys may stand nearer to the front."""
        if self._kept:
            for key in filter(self._by_key.__contains__, keys):
                for kept in self._by_key[key]:
                    self._rank(kept)

    def first(self) -> KeptBlock | None:
        """The block that leaves first."""
        ahead = self._first_of(False)
        passed = self._first_of(True) if self._heaps[True] else None
        if ahead is None or passed is None:
            return ahead or passed
        return min(ahead, passed, key=lambda kept: kept.place)

    def first_ahead(self) -> KeptBlock | None:
        """The block that leaves first of those that the walk has not passed."""
        return self._first_of(False)

    def begin_walk(self) -> None:
        """No block is passed."""
        passed, self._heaps[True] = self._heaps[True], []
        for _, block_id in filter(self._is_current[True], passed):
            kept = self._kept[block_id]
            kept.is_passed = False
            self._push(kept)

    def pass_over(self, kept: KeptBlock) -> None:
        """The walk passes a block."""
        kept.is_passed = True
        self._push(kept)

    def _first_of(self, is_passed: bool) -> KeptBlock | None:
        heap = self._heaps[is_passed]
        while (entry := first(heap, self._is_current[is_passed])) is not None:
            kept = self._kept[entry[1]]
            if self._rank(kept):
                return kept
        return None

    def _rank(self, kept: KeptBlock) -> bool:
        """Look at the place of a block; whether it is the same."""
        place = self._place_of(kept)
        is_same = place == kept.place
        if not is_same:
            kept.place = place
            self._push(kept)
        return is_same

    def _push(self, kept: KeptBlock) -> None:
        heap, is_current = self._heaps[kept.is_passed], self._is_current[kept.is_passed]
        push(heap, (kept.place, kept.block.block_id), is_current, len(self._kept))

    def _is_current_of(self, is_passed: bool, entry: _Entry) -> bool:
        kept = self._kept.get(entry[1])
        return kept is not None and kept.place is entry[0] and kept.is_passed == is_passed
