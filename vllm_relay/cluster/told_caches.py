# SPDX-License-Identifier: Apache-2.0
"""Which replica holds which KV blocks, as engines tell that publish what they store and remove.

vLLM's KV events name blocks by the engine's own hashes, which may cover more than the tokens up to
the end of a block (a seed of the process, tokens ahead for EAGLE and MTP). Stored blocks come with
their tokens and the name of the block before, so that names are learned here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from threading import Lock

from vllm_relay.cluster.replica_index import (
    NO_BLOCK,
    Block,
    PredictedCaches,
    block_of,
    chain_of,
)

_LEAST_TOLD = 32
_OTHERS_PER_OWN = 8


class _Told:
    """What one replica told."""

    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}
        """By the engine's names of them, 60 bits of these."""
        self.copies: dict[int, int] = {}
        """More blocks of the KV cache with the same name."""
        self.names: dict[Block, int] = {}
        """More names of the same block."""


class ToldCaches(PredictedCaches):
    """As `PredictedCaches` for what was sent and is not told yet.

    What comes after a block that is not known is left out; what comes after one that is removed
    stays, as it does in vLLM. A replica has no more blocks than its
    cache: if it tells of more, something was missed, and all that it told is forgotten. Takes about
    75 bytes for each block of each replica more than `HeldBlocks`. May be told and asked in
    different threads.

    Args:
        num_blocks: of each replica's cache.
        block_size_tokens: of a KV block.

    Raises:
        ValueError: a replica's cache has no blocks.
    """

    may_have_gaps = True

    def __init__(self, num_blocks: Sequence[int], block_size_tokens: int) -> None:
        super().__init__(num_blocks)
        self.block_size_tokens = block_size_tokens
        self._told = [_Told() for _ in num_blocks]
        self._own = [0] * len(num_blocks)
        """Of each replica, prompts of which it told and which it was sent,"""
        self._others: list[Counter[int]] = [Counter() for _ in num_blocks]
        """and those that only one other was sent, by this."""
        self._lock = Lock()

    def taken_for(self, replica: int) -> int | None:
        """The replica for which another one seems to tell: nearly all that it told of what was
        sent was sent there alone. None if there is none, or not enough was told yet."""
        own, others = self._own[replica], self._others[replica]
        if not others:
            return None
        [(other, count)] = others.most_common(1)
        return other if count >= _LEAST_TOLD and own * _OTHERS_PER_OWN < count else None

    def sent(self, replica: int, chain: Sequence[Block], num_held: int = 0) -> None:
        """See `ReplicaIndex`."""
        with self._lock:
            super().sent(replica, chain, num_held)

    def clear(self, replica: int) -> None:
        """See `ReplicaIndex`."""
        with self._lock:
            self._forget(replica)
            super().clear(replica)

    def forget(self, replica: int) -> None:
        """What a replica told may no longer be so."""
        with self._lock:
            self._forget(replica)

    def stored(
        self,
        replica: int,
        names: Sequence[bytes | int],
        after: bytes | int | None,
        token_ids: Sequence[int],
    ) -> None:
        """A replica computed blocks, one after the other.

        Args:
            names: the engine's hashes of them.
            after: that of the block before the first one; None if there is none.
            token_ids: of all of them; left out unless these are full blocks.
        """
        if len(token_ids) != len(names) * self.block_size_tokens:
            return
        told = self._told[replica]
        with self._lock:
            before = NO_BLOCK if after is None else told.blocks.get(block_of(after))
            if before is None:
                return
            chain = chain_of(token_ids, self.block_size_tokens, before)
            new = []
            for name, block in zip(map(block_of, names), chain, strict=True):
                if name in told.blocks:
                    told.copies[name] = told.copies.get(name, 0) + 1
                else:
                    told.blocks[name] = block
                    new.append(block)
            if new:
                self._note_whose(replica, new[-1])
            sent = self._sent[replica]
            for block in set(new).difference(self.held.add(replica, new)):
                if block in sent:
                    del sent[block]
                else:
                    told.names[block] = told.names.get(block, 0) + 1
            if len(told.blocks) + sum(told.copies.values()) > self._num_blocks[replica]:
                self._forget(replica)

    def removed(self, replica: int, names: Sequence[bytes | int]) -> None:
        """A replica has these blocks no longer."""
        told = self._told[replica]
        gone = []
        with self._lock:
            for name in map(block_of, names):
                if name in told.copies:
                    _take_one(told.copies, name)
                    continue
                block = told.blocks.pop(name, None)
                if block is None:
                    continue
                if block in told.names:
                    _take_one(told.names, block)
                else:
                    gone.append(block)
            self.held.discard(replica, gone)

    def _note_whose(self, replica: int, block: Block) -> None:
        holders = [each for each in self.held.holders(block) if block in self._sent[each]]
        if replica in holders:
            self._own[replica] += 1
        elif len(holders) == 1:
            self._others[replica][holders[0]] += 1

    def _forget(self, replica: int) -> None:
        told = self._told[replica]
        self.held.discard(replica, told.blocks.values())
        self._told[replica] = _Told()


def _take_one(counts: dict[int, int], key: int) -> None:
    if counts[key] == 1:
        del counts[key]
    else:
        counts[key] -= 1
