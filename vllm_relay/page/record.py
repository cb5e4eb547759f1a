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
from typing import Any, NamedTuple

from vllm_relay.modules.prompt.plan import plan_of_request


class CachedBlock(NamedTuple):
    """The content of a KV block."""

    hash: bytes
    parent: bytes | None
    """The hash of the block before it; None: it is the first one of a prompt or of a module."""
    run_tokens: bytes
    """Of all blocks that came to be found with it, as 32-bit integers."""
    offset: int
    """Of its first token there."""
    module: str | None
    is_plain: bool
    """Whether its hash is that of its tokens alone: no adapter, no salt, no images, no modules."""


_ELSEWHERE = CachedBlock(b"", None, b"", 0, None, False)
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
        size = self.block_size
        parent = block_hashes[0] if first else None
        hashes = block_hashes[1:] if first else block_hashes
        begin = first * size
        tokens = request.all_token_ids[begin : begin + len(blocks) * size]
        run = array("i", tokens).tobytes()
        plan = plan_of_request(request)
        modules: dict[int, str] = {}
        is_plain = plan is None and not (
            request.lora_request or request.cache_salt or request.mm_features
        )
        if plan is not None:
            modules = _modules(plan, first, first + len(blocks))
        cached, used_s, hits, now_s = self.cached, self.used_s, self.hits, self._clock()
        changed: list[int] = []
        number, offset = first, 0
        for block, block_hash in zip(blocks, hashes, strict=False):
            if block.block_hash is not None and not block.is_null:
                block_id = block.block_id
                module = modules.get(number)
                if module is not None and modules.get(number - 1) != module:
                    parent = None
                self.num_cached += cached[block_id] is None
                cached[block_id] = CachedBlock(block_hash, parent, run, offset, module, is_plain)
                hits[block_id], used_s[block_id] = 0, now_s
                if module is not None:
                    self.module_blocks.add(block_id)
                changed.append(block_id)
            parent = block_hash
            number += 1
            offset += size
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
        """Of blocks that left, by the hash of the block before; that may leave with them."""
        for block_id in block_ids:
            entry = cached[block_id]
            if entry is None:
                continue
            cached[block_id] = None
            left.append(block_id)
            if entry.module is not None:
                self.module_blocks.discard(block_id)
            num_hits, last_s = hits[block_id], used_s[block_id]
            if uses and entry.hash in uses:
                num_hits, last_s = _added(uses.pop(entry.hash), num_hits, last_s)
            if last_s and entry.parent is not None:
                uses[entry.parent] = _added(uses.get(entry.parent, (0, 0.0)), num_hits, last_s)
        for block_hash, (num_hits, last_s) in uses.items():
            self._use(block_hash, num_hits, last_s)
        self.num_cached -= len(left)
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
        item = array("i").itemsize
        part = entry.run_tokens[entry.offset * item : (entry.offset + self.block_size) * item]
        return array("i", part).tolist()

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


def _added(uses: tuple[int, float], num_hits: int, used_s: float) -> tuple[int, float]:
    return uses[0] + num_hits, max(uses[1], used_s)


def _modules(plan: Any, first: int, end: int) -> dict[int, str]:
    """Which module each of these blocks of a prompt is of, by the number of the block."""
    names: dict[int, str] = {}
    for index, segment in enumerate(plan.segments):
        begin, stop = (slot // plan.block_size for slot in plan.first_slots[index : index + 2])
        names |= dict.fromkeys(range(max(begin, first - 1), min(stop, end)), segment.name or "base")
    return names
