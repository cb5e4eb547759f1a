# SPDX-License-Identifier: Apache-2.0
"""Which replica holds which KV blocks: as its engine tells, else as its cache is expected to."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

Block = int
"""Of a block's chained hash 64 bits, so that a block tells its whole prefix, see `block_of`."""


def block_of(block_hash: bytes | int) -> Block:
    """The block of one of vLLM's hashes, which are bytes, or numbers in events of old."""
    if isinstance(block_hash, int):
        return block_hash & 0xFFFF_FFFF_FFFF_FFFF
    return int.from_bytes(block_hash[:8], "little")


class HeldBlocks:
    """The blocks of every replica. Takes about 90 bytes for each block that any replica holds.

    Args:
        num_replicas: known by their numbers, from 0.
    """

    def __init__(self, num_replicas: int) -> None:
        self.num_replicas = num_replicas
        self._holders: dict[Block, int] = {}
        """Of each block, a bit for each replica that holds it."""
        # most blocks have one holder: these numbers are shared
        self._bits = [1 << replica for replica in range(num_replicas)]
        self._all = (1 << num_replicas) - 1

    def __len__(self) -> int:
        """Different blocks that are held anywhere."""
        return len(self._holders)

    def add(self, replica: int, blocks: Iterable[Block]) -> None:
        """A replica holds these blocks now."""
        holders, bit = self._holders, self._bits[replica]
        for block in blocks:
            known = holders.get(block)
            holders[block] = bit if known is None else known | bit

    def discard(self, replica: int, blocks: Iterable[Block]) -> None:
        """A replica holds these blocks no longer."""
        holders, bit = self._holders, self._bits[replica]
        for block in blocks:
            left = holders.get(block, 0) & ~bit
            if left:
                holders[block] = self._bits[left.bit_length() - 1] if not left & left - 1 else left
            else:
                holders.pop(block, None)

    def clear(self, replica: int) -> None:
        """A replica holds no blocks any more."""
        bit = self._bits[replica]
        self.discard(replica, [block for block, held in self._holders.items() if held & bit])

    def holds(self, replica: int, block: Block) -> bool:
        return bool(self._holders.get(block, 0) & self._bits[replica])

    def is_held(self, block: Block) -> bool:
        """Whether any replica holds a block."""
        return block in self._holders

    def holders(self, block: Block) -> Iterator[int]:
        """The replicas that hold a block."""
        return _numbers(self._holders.get(block, 0))

    def depths(self, chain: Sequence[Block]) -> list[int]:
        """Of each replica, how many of a chain's first blocks it holds without a gap."""
        depths = [0] * self.num_replicas
        holders, alive = self._holders, self._all
        depth = 0
        for block in chain:
            held = holders.get(block, 0) & alive
            if held != alive:
                _set(depths, alive ^ held, depth)
                alive = held
                if not alive:
                    return depths
            depth += 1
        _set(depths, alive, depth)
        return depths


def _set(depths: list[int], bits: int, depth: int) -> None:
    if depth:
        for replica in _numbers(bits):
            depths[replica] = depth


def _numbers(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


class ReplicaIndex(Protocol):
    """What a router knows of the replicas' caches."""

    def depths(self, chain: Sequence[Block]) -> list[int]:
        """Of each replica, how many of a chain's first blocks it holds without a gap."""
        ...

    def sent(self, replica: int, chain: Sequence[Block]) -> None:
        """A prompt with these full blocks was sent to a replica."""
        ...

    def clear(self, replica: int) -> None:
        """A replica's cache is empty."""
        ...


class PredictedCaches:
    """What replicas hold that do not tell: of each, the blocks sent last, as many as fit.

    As in vLLM the block that was used longest ago leaves first, of one prompt the last one.

    Args:
        num_blocks: of each replica's cache.

    Raises:
        ValueError: a replica's cache has no blocks.
    """

    def __init__(self, num_blocks: Sequence[int]) -> None:
        if not num_blocks or min(num_blocks) < 1:
            raise ValueError(f"caches of {list(num_blocks)} blocks given, expected at least 1 each")
        self.held = HeldBlocks(len(num_blocks))
        self._num_blocks = list(num_blocks)
        self._used: list[OrderedDict[Block, None]] = [OrderedDict() for _ in num_blocks]
        """Of each replica, the next to leave first."""

    def depths(self, chain: Sequence[Block]) -> list[int]:
        """See `ReplicaIndex`."""
        return self.held.depths(chain)

    def resize(self, replica: int, num_blocks: int) -> None:
        """A replica's cache has another size, and is empty."""
        self.clear(replica)
        self._num_blocks[replica] = num_blocks

    def sent(self, replica: int, chain: Sequence[Block]) -> None:
        """See `ReplicaIndex`."""
        used = self._used[replica]
        new = []
        for block in reversed(chain):
            if block in used:
                used.move_to_end(block)
            else:
                used[block] = None
                new.append(block)
        self.held.add(replica, new)
        left = [used.popitem(last=False)[0] for _ in range(len(used) - self._num_blocks[replica])]
        self.held.discard(replica, left)

    def clear(self, replica: int) -> None:
        """See `ReplicaIndex`."""
        self.held.discard(replica, self._used[replica])
        self._used[replica].clear()
