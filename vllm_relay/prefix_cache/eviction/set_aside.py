# SPDX-License-Identifier: Apache-2.0
"""Free blocks that a policy keeps, in the order in which they leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_relay.ranked import Ranked

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

Place = tuple[float, ...]
"""In the order in which free blocks leave; of one block alone."""


@dataclass(slots=True, eq=False)
class KeptBlock:
    """A block that is set aside."""

    block: KVCacheBlock
    key: bytes  # its hash when it was; the block may have lost it since
    freed_at: int  # how many blocks were freed before
    is_passed: bool  # whether the walk has come to it
    place: Place = ()  # as when it was ranked last
    depth_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.depth_tokens = self.block.block_hash_num_tokens or 0

    @property
    def is_cached(self) -> bool:
        return self.block.block_hash == self.key


class SetAside:
    """Blocks that leave in the order of their places, and a walk over them in the same order.

    Where a block stands, `place_of`, is looked at again only where it would be the next to leave,
    or when its place is said to have become smaller.
    """

    def __init__(self, place_of: Callable[[KeptBlock], Place]) -> None:
        self._place_of = place_of
        self._kept: dict[int, KeptBlock] = {}  # by block id
        self._by_key: dict[bytes, list[KeptBlock]] = {}
        self._ranked: dict[bool, Ranked[KeptBlock]] = {False: Ranked(), True: Ranked()}
        """By whether the walk has passed them."""

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
        self._ranked[kept.is_passed].discard(kept)

    def rank_again(self, keys: Sequence[bytes]) -> None:
        """Blocks with these keys may stand nearer to the front."""
        if self._kept:
            for key in filter(self._by_key.__contains__, keys):
                for kept in self._by_key[key]:
                    self._rank(kept)

    def first(self) -> KeptBlock | None:
        """The block that leaves first."""
        ahead = self._first_of(False)
        passed = self._first_of(True)
        if ahead is None or passed is None:
            return ahead or passed
        return min(ahead, passed, key=lambda kept: kept.place)

    def first_ahead(self) -> KeptBlock | None:
        """The block that leaves first of those that the walk has not passed."""
        return self._first_of(False)

    def begin_walk(self) -> None:
        """No block is passed."""
        passed, self._ranked[True] = self._ranked[True], Ranked()
        for kept in passed:
            kept.is_passed = False
            self._ranked[False].add(kept, kept.place)

    def pass_over(self, kept: KeptBlock) -> None:
        """The walk passes a block."""
        self._ranked[kept.is_passed].discard(kept)
        kept.is_passed = True
        self._ranked[True].add(kept, kept.place)

    def _first_of(self, is_passed: bool) -> KeptBlock | None:
        while (kept := self._ranked[is_passed].first()) is not None:
            if self._rank(kept):
                return kept
        return None

    def _rank(self, kept: KeptBlock) -> bool:
        """Look at the place of a block; whether it is the same."""
        place = self._place_of(kept)
        is_same = place == kept.place
        if not is_same:
            kept.place = place
            self._ranked[kept.is_passed].add(kept, place)
        return is_same
