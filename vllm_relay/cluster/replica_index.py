# SPDX-License-Identifier: Apache-2.0
"""Which replica holds which KV blocks, and what is expected of those that do not tell."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

Block = int
"""Of a block's chained hash 60 bits, so that a block tells its whole prefix. Python keeps so many
in 32 bytes, and 64 bits in 48."""

BLOCK_MASK = (1 << 60) - 1
_STRIDE = 8

NO_BLOCK: Block = 0
"""What the first block of a prompt comes after."""


def block_of(block_hash: bytes | int) -> Block:
    """The block of one of vLLM's hashes, which are bytes, or numbers of 64 bits in events."""
    if isinstance(block_hash, int):
        return block_hash & BLOCK_MASK
    return int.from_bytes(block_hash[:8], "little") & BLOCK_MASK


def chain_of(
    token_ids: Sequence[int], block_size_tokens: int, after: Block = NO_BLOCK
) -> list[Block]:
    """The full blocks of a prompt, for this process: others hash differently.

    Args:
        token_ids: or numbers of the pieces of its text.
        after: the block before the first one.
    """
    chain = []
    for content in zip(*[iter(token_ids)] * block_size_tokens, strict=False):
        after = hash((after, content)) & BLOCK_MASK
        chain.append(after)
    return chain


class HeldBlocks:
    """The blocks of every replica. Takes about 75 bytes for each block that any replica holds.

    Args:
        num_replicas: known by their numbers, from 0.
        may_have_gaps: whether a replica may hold a block and not the one before.
    """

    def __init__(self, num_replicas: int, *, may_have_gaps: bool = False) -> None:
        self.num_replicas = num_replicas
        self._may_have_gaps = may_have_gaps
        self._holders: dict[Block, int] = {}
        """Of each block, a bit for each replica that holds it."""
        # most blocks have one holder: these numbers are shared
        self._bits = [1 << replica for replica in range(num_replicas)]
        self._all = (1 << num_replicas) - 1

    def __len__(self) -> int:
        """Different blocks that are held anywhere."""
        return len(self._holders)

    def add(self, replica: int, blocks: Iterable[Block]) -> list[Block]:
        """A replica holds these blocks now; returns those that it did not before."""
        holders, bit = self._holders, self._bits[replica]
        new = []
        for block in blocks:
            known = holders.get(block)
            if known is None:
                holders[block] = bit
            elif known & bit:
                continue
            else:
                holders[block] = known | bit
            new.append(block)
        return new

    def discard(self, replica: int, blocks: Iterable[Block]) -> None:
        """A replica holds these blocks no longer."""
        holders, bit = self._holders, self._bits[replica]
        for block in blocks:
            held = holders.get(block, 0)
            if held == bit:
                del holders[block]
            elif held & bit:
                left = held ^ bit
                holders[block] = left if left & left - 1 else self._bits[left.bit_length() - 1]

    def holds(self, replica: int, block: Block) -> bool:
        return bool(self._holders.get(block, 0) & self._bits[replica])

    def is_held(self, block: Block) -> bool:
        """Whether any replica holds a block."""
        return block in self._holders

    def holders(self, block: Block) -> Iterator[int]:
        """The replicas that hold a block."""
        return numbers_of(self._holders.get(block, 0))

    def ends(self, chain: Sequence[Block]) -> list[tuple[int, int]]:
        """How much of a chain the replicas hold without a gap.

        Where caches lose the last blocks of a prompt first, of eight blocks only the last one is
        looked at if nobody ends before it.

        Returns:
            How many of its first blocks, ascending, and a bit for each replica that holds just
            these. Every replica is in one of them.
        """
        ends = []
        get, alive = self._holders.get, self._all
        begin, most = 0, len(chain)
        stride = most + 1 if self._may_have_gaps else _STRIDE
        while begin < most:
            end = begin + stride
            if end > most or get(chain[end - 1], 0) & alive != alive:
                for depth, block in enumerate(chain[begin:end], begin):
                    held = get(block, 0) & alive
                    if held != alive:
                        ends.append((depth, alive ^ held))
                        alive = held
                        if not alive:
                            return ends
            begin = end
        ends.append((most, alive))
        return ends


def numbers_of(bits: int) -> Iterator[int]:
    """Which bits are set, the lowest first."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


class ReplicaIndex(Protocol):
    """What is known of the replicas' caches.

    Attributes:
        held: the blocks in them.
    """

    held: HeldBlocks

    def sent(self, replica: int, chain: Sequence[Block], num_held: int = 0) -> None:
        """A prompt with these full blocks was sent to a replica, which holds the first of them."""
        ...

    def clear(self, replica: int) -> None:
        """A replica's cache is empty."""
        ...


class PredictedCaches:
    """What replicas hold that do not tell: of each, the blocks sent last, as many as fit.

    As in vLLM the block that was used longest ago leaves first, of one prompt the last one, so that
    there are no gaps.

    Args:
        num_blocks: of each replica's cache.

    Raises:
        ValueError: a replica's cache has no blocks.
    """

    may_have_gaps = False
    """See `HeldBlocks`."""

    def __init__(self, num_blocks: Sequence[int]) -> None:
        if not num_blocks or min(num_blocks) < 1:
            raise ValueError(f"caches of {list(num_blocks)} blocks given, expected at least 1 each")
        self.held = HeldBlocks(len(num_blocks), may_have_gaps=self.may_have_gaps)
        self._num_blocks = list(num_blocks)
        self._sent: list[OrderedDict[Block, None]] = [OrderedDict() for _ in num_blocks]
        """Of each replica, the next to leave first."""

    def sent(self, replica: int, chain: Sequence[Block], num_held: int = 0) -> None:
        """See `ReplicaIndex`."""
        sent, held = self._sent[replica], self.held
        known = list(filter(sent.__contains__, chain)) if sent else []
        for block in reversed(held.add(replica, chain[num_held:])):
            sent[block] = None
        deque(map(sent.move_to_end, reversed(known)), maxlen=0)  # each
        left = [sent.popitem(last=False)[0] for _ in range(len(sent) - self._num_blocks[replica])]
        held.discard(replica, left)

    def resize(self, replica: int, num_blocks: int) -> None:
        """A replica's cache has another size, and is empty."""
        self.clear(replica)
        self._num_blocks[replica] = num_blocks

    def clear(self, replica: int) -> None:
        """See `ReplicaIndex`."""
        self.held.discard(replica, self._sent[replica])
        self._sent[replica].clear()
