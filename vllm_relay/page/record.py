# SPDX-License-Identifier: Apache-2.0
"""What is in the KV blocks of an engine, as far as the prefix cache finds them.

It costs a step as little as it can: a tuple for each block that comes to be found, and a look at
each that is taken. What is made of it is made when somebody asks.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_relay.modules.prompt.plan import ModulePlan, plan_of_request

CachedBlock = tuple[bytes, "bytes | None", tuple[int, ...], int, bool, "str | None"]
"""The content of a KV block: its hash, that of the block before it, the tokens of all blocks that
came to be found with it, the place of its first one among them, whether its hash is made of tokens
alone (no adapter, salt, image, module or embedding), and its module. A tuple of what the garbage
collector need not look at."""

_COMMON = "(every prompt)"
"""The module of what every prompt of a schema has."""
_ELSEWHERE: CachedBlock = (b"", None, (), 0, False, None)
"""For blocks of other KV cache groups."""


@dataclass
class Listener:
    """Is told of changes, until it forgets to ask."""

    until_s: float
    changed: set[int] = field(default_factory=set)
    """Ids of blocks of which anything in the record has changed."""


class BlockRecord:
    """Implements `vllm_changes.block_pool.BlockObserver`.

    Uses count where they are known with least work: a hit counts for the last block that was found,
    and goes to the block before it when that one leaves. The hits of a block are those of all that
    continue it.

    Args:
        num_blocks: of the pool.
        block_size: tokens of a block.
        hash_block_size: tokens of which requests have a hash each.
        find: the id of a block with this hash, if the prefix cache has any.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        hash_block_size: int,
        find: Callable[[bytes], int | None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.block_size = block_size
        self.cached: list[CachedBlock | None] = [None] * num_blocks
        """By block id."""
        self.hits = array("L", bytes(array("L").itemsize * num_blocks))
        """By block id: how many requests found it, and nothing behind it."""
        self.used_s = array("d", bytes(8 * num_blocks))
        """By block id: when it was last used by a request that used nothing behind it, or came to
        be found; in seconds since 1970."""
        self.num_cached = 0
        """Blocks of all groups that can be found."""
        self.query_tokens = self.hit_tokens = 0
        """Of admitted requests, and those of them that were found."""
        self.module_blocks: set[int] = set()
        """Ids of blocks of modules."""
        self.listeners: list[Listener] = []
        self._find = find
        self._hashes_per_block = block_size // hash_block_size
        self._clock = clock

    def on_cached(
        self, request: Any, blocks: Sequence[Any], block_hashes: Sequence[bytes], first: int
    ) -> None:
        size, now_s = self.block_size, self._clock()
        parent = block_hashes[0] if first else None
        hashes = block_hashes[1:] if first else block_hashes
        tokens: tuple[int, ...] = ()
        if not request.cache_salt:  # else nobody but its tenant may read it
            tokens = tuple(request.all_token_ids[first * size : (first + len(blocks)) * size])
        plan = plan_of_request(request)
        is_plain = request.prompt_embeds is None and not (
            plan or request.lora_request or request.cache_salt or request.mm_features
        )
        cached, used_s, hits = self.cached, self.used_s, self.hits
        changed: list[int] = []
        offset, num_new = 0, 0
        for block, block_hash in zip(blocks, hashes, strict=False):
            if block.block_hash is not None:  # of one that can be found
                block_id = block.block_id
                num_new += cached[block_id] is None
                cached[block_id] = (block_hash, parent, tokens, offset, is_plain, None)
                hits[block_id] = 0
                used_s[block_id] = now_s
                changed.append(block_id)
            parent = block_hash
            offset += size
        self.num_cached += num_new
        if plan is not None:
            self._name_modules(plan, blocks, first)
        if self.listeners:
            self.listeners = [each for each in self.listeners if each.until_s >= now_s]
            for listener in self.listeners:
                listener.changed.update(changed)

    def on_cached_elsewhere(self, blocks: Iterable[Any]) -> None:
        for block in blocks:
            if block.block_hash is not None and self.cached[block.block_id] is None:
                self.cached[block.block_id] = _ELSEWHERE
                self.num_cached += 1

    def on_taken(self, blocks: Iterable[Any]) -> None:
        self.on_evicted([block.block_id for block in blocks])

    def on_evicted(self, block_ids: Iterable[int]) -> None:
        cached, hits, used_s = self.cached, self.hits, self.used_s
        left: list[int] = []
        uses: dict[bytes, tuple[int, float]] = {}
        """Of blocks that left, by the hash of the block before."""
        before: bytes | None = None  # the last one that left
        num_hits, last_s = 0, 0.0
        for block_id in block_ids:
            entry = cached[block_id]
            if entry is None:
                continue
            cached[block_id] = None
            left.append(block_id)
            if entry[0] != before:  # a prompt leaves from its end
                _add(uses, before, num_hits, last_s)
                num_hits, last_s = uses.pop(entry[0], (0, 0.0)) if uses else (0, 0.0)
            before = entry[1]
            num_hits += hits[block_id]
            if used_s[block_id] > last_s:
                last_s = used_s[block_id]
        if not left:
            return
        _add(uses, before, num_hits, last_s)
        for block_hash, (num_hits, last_s) in uses.items():
            self._use(block_hash, num_hits, last_s)
        self.num_cached -= len(left)
        if self.module_blocks:
            self.module_blocks.difference_update(left)
        for listener in self.listeners:
            listener.changed.update(left)

    def on_reset(self) -> None:
        everything = [block_id for block_id, entry in enumerate(self.cached) if entry is not None]
        self.cached = [None] * len(self.cached)
        self.num_cached = 0
        self.module_blocks.clear()
        for listener in self.listeners:
            listener.changed.update(everything)

    def on_admitted(self, request: Any, hit_tokens: int) -> None:
        is_new = request.num_preemptions == 0  # the others find what they computed themselves
        if is_new:
            self.query_tokens += request.num_tokens
            self.hit_tokens += hit_tokens
        self._use(self.hash_at(request, hit_tokens), int(is_new), self._clock())

    def before_free(self, request: Any) -> None:
        self._use(self.hash_at(request, request.num_computed_tokens), 0, self._clock())

    def hash_at(self, request: Any, num_tokens: int) -> bytes | None:
        """Of the last full block among the first tokens of a request."""
        known = request.block_hashes
        depth = min(num_tokens // self.block_size, len(known) // self._hashes_per_block)
        return known[depth * self._hashes_per_block - 1] if depth else None

    def tokens(self, block_id: int) -> list[int]:
        """Of a block that can be found."""
        entry = self.cached[block_id]
        assert entry is not None
        _, _, tokens, offset, _, _ = entry
        return list(tokens[offset : offset + self.block_size])

    def _name_modules(self, plan: ModulePlan, blocks: Sequence[Any], first: int) -> None:
        """Say of blocks of a prompt with modules which one they are of; the first block of a module
        has none before it.

        Args:
            first: the place of these blocks in the prompt.
        """
        for segment, begin, end in zip(
            plan.segments, plan.first_slots, plan.first_slots[1:], strict=False
        ):
            begin, end = begin // plan.block_size, end // plan.block_size
            for place in range(max(begin, first), min(end, first + len(blocks))):
                block_id = blocks[place - first].block_id
                entry = self.cached[block_id]
                if entry is not None:
                    block_hash, parent, tokens, offset, is_plain, _ = entry
                    parent = None if place == begin else parent
                    name = segment.name or _COMMON
                    self.cached[block_id] = (block_hash, parent, tokens, offset, is_plain, name)
                    self.module_blocks.add(block_id)

    def _use(self, block_hash: bytes | None, num_hits: int, used_s: float) -> None:
        if block_hash is None:
            return
        block_id = self._find(block_hash)
        if block_id is None or self.cached[block_id] is None:
            return
        self.hits[block_id] += num_hits
        self.used_s[block_id] = max(self.used_s[block_id], used_s)
        for listener in self.listeners:
            listener.changed.add(block_id)


def _add(
    uses: dict[bytes, tuple[int, float]], block_hash: bytes | None, num_hits: int, used_s: float
) -> None:
    if block_hash is not None:
        known_hits, known_s = uses.get(block_hash, (0, 0.0))
        uses[block_hash] = known_hits + num_hits, max(known_s, used_s)
