# SPDX-License-Identifier: Apache-2.0
"""What of an engine's KV cache those who watch have not been told, and what stands beside it.

Nothing is collected for nobody: who has not asked for `FORGET_S` seconds is forgotten.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from vllm_relay.commands.errors import CommandError
from vllm_relay.page.blocks import NO_KEY, key_of, pack
from vllm_relay.page.record import BlockRecord, CachedBlock, Listener

FORGET_S = 10.0
MAX_WATCHERS = 16
"""Front ends; each asks for all of its viewers."""
MAX_BLOCKS = 2048
"""Told in one answer: about a millisecond of the engine core."""
MAX_ASKED = 256
"""Blocks whose tokens are told in one answer, and of which it says how long they are kept."""


@dataclass
class _Watcher:
    listener: Listener
    number: int = 0
    """Of the last answer."""
    pins: int | None = None
    """How often these had changed when they were told."""


class Feed:
    """Beside a scheduler.

    Args:
        scheduler: vLLM's or one that extends it.
    """

    def __init__(
        self,
        scheduler: Any,
        record: BlockRecord,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.id = uuid.uuid4().hex
        self.record = record
        self._scheduler = scheduler
        self._manager = scheduler.kv_cache_manager
        self._pool = self._manager.block_pool
        self._clock = clock
        self._watchers: dict[str, _Watcher] = {}
        self._numbers = count(1)
        """Of answers; none is used twice, so that no change is taken for one of an older answer."""
        self._kv_tokens_read = self._kv_tokens_logical = 0

    def on_step(self, stats: Any) -> None:
        """Add the statistics of a step, as RELAY's workers send them."""
        self._kv_tokens_read += stats.kv_tokens_read
        self._kv_tokens_logical += stats.kv_tokens_logical

    def poll(self, watcher: str, asked: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """What is new since the last answer.

        Args:
            watcher: who asks.
            asked: by id of a feed: the `number` of its last answer that came, or all is told again;
                `tokens_of`, id and key of blocks whose tokens are wanted; `kept_of`, ids of blocks
                of which is wanted how long they are kept.

        Returns:
            The `feed` that answers, its `block_size_tokens` and the `number` of this answer;
            whether all is told from here on (`is_full`), and whether there is `more` of it;
            `blocks` and `modules`, names by block id; `running`, the id of a request and the keys
            of blocks with which its runs of them end; `pinned` block ids, or None if they are as
            before; `tokens`, None where the block is gone; `kept`: 0 as any other, 1 because
            several requests have used it, 2 because a waiting request needs it, None: it is not
            free; `stats`.

        Raises:
            CommandError: 409 too many watch.
        """
        mine = asked.get(self.id, {})
        number = mine.get("number")
        now_s = self._clock()
        self._forget(now_s)
        known = self._watchers.get(watcher)
        is_full = known is None or known.number != number
        if known is None or is_full:
            known = self._watch(watcher, now_s)
        known.listener.until_s = now_s + FORGET_S
        known.number = next(self._numbers)
        ids = self._take(known.listener.changed)
        pins = getattr(self._scheduler, "pins", None)
        pinned = None
        if pins is not None and known.pins != pins.num_changes:
            known.pins = pins.num_changes
            pinned = list(pins.held_blocks)
        cached = self.record.cached
        modules = {
            block_id: entry[-1]
            for block_id in ids
            if block_id in self.record.module_blocks and (entry := cached[block_id]) is not None
        }
        return {
            "feed": self.id,
            "number": known.number,
            "is_full": is_full,
            "block_size_tokens": self.record.block_size,
            "more": bool(known.listener.changed),
            "time_s": now_s,
            "blocks": b"".join(map(self._packed, ids)),
            "modules": list(modules.items()),
            "running": [self._running(request) for request in self._scheduler.running],
            "pinned": pinned,
            "tokens": [self._tokens(*each) for each in mine.get("tokens_of", ())[:MAX_ASKED]],
            "kept": self._kept(mine.get("kept_of", ())[:MAX_ASKED]),
            "stats": self._stats(),
        }

    def prefix(self, feed: str, blocks: Sequence[Sequence[int]]) -> list[int] | None:
        """The tokens of a prefix; None where another feed is meant.

        Args:
            blocks: id and key of its blocks, from the first one of a prompt on.

        Raises:
            CommandError: 409 it is not there any more, or others have computed it who had more than
                tokens.
        """
        if feed != self.id:
            return None
        entries = [self._entry(*each) for each in blocks]
        if not entries or entries[0][1] is not None:
            raise CommandError(
                409, "what this prefix begins with has left the KV cache: pin its text instead"
            )
        if not all(is_plain for *_, is_plain, _ in entries):
            raise CommandError(
                409,
                "this prefix is of an adapter, a cache salt, images or prompt modules, and not of "
                "its tokens alone: pin it with POST /relay/pins as requests have it",
            )
        return [token for block_id, _ in blocks for token in self.record.tokens(block_id)]

    def evict(self, feed: str, blocks: Sequence[Sequence[int]]) -> int | None:
        """Let these blocks be found no more, which come with all that continue them; how many.
        None where another feed is meant.

        Args:
            blocks: id and key of each.

        Raises:
            CommandError: 409 somebody uses one.
        """
        if feed != self.id:
            return None
        pool, pins = self._pool, getattr(self._scheduler, "pins", None)
        entries = self.record.cached
        there = {
            block_id
            for block_id, key in blocks
            if 0 <= block_id < len(entries)
            and (entry := entries[block_id]) is not None
            and key_of(entry[0]) == key
        }
        held = set() if pins is None else there & pins.held_blocks
        if held:
            raise CommandError(
                409, f"{len(held)} of these {len(there)} blocks are pinned: unpin them first"
            )
        used = sum(pool.blocks[block_id].ref_cnt > 0 for block_id in there)
        if used:
            raise CommandError(
                409,
                f"requests use {used} of these {len(there)} blocks: wait until they have ended",
            )
        self._manager.evict_blocks(there)
        return len(there)

    def _forget(self, now_s: float) -> None:
        known = self._watchers.items()
        self._watchers = {name: each for name, each in known if each.listener.until_s >= now_s}
        listeners = (each.listener for each in self._watchers.values())
        self.record.listeners = list(listeners)

    def _watch(self, watcher: str, now_s: float) -> _Watcher:
        if watcher not in self._watchers and len(self._watchers) >= MAX_WATCHERS:
            raise CommandError(409, f"{MAX_WATCHERS} servers watch this engine, the most there are")
        everything = {i for i, entry in enumerate(self.record.cached) if entry is not None}
        new = self._watchers[watcher] = _Watcher(Listener(now_s + FORGET_S, everything))
        self.record.listeners = [each.listener for each in self._watchers.values()]
        return new

    def _take(self, changed: set[int]) -> list[int]:
        if len(changed) <= MAX_BLOCKS:
            taken = list(changed)
            changed.clear()
        else:
            taken = list(islice(changed, MAX_BLOCKS))
            changed.difference_update(taken)
        return taken

    def _packed(self, block_id: int) -> bytes:
        entry = self.record.cached[block_id]
        if entry is None or not entry[0]:
            return pack(block_id, 0, NO_KEY, NO_KEY, 0.0)
        hits, used_s = self.record.hits[block_id], self.record.used_s[block_id]
        return pack(block_id, hits, key_of(entry[0]), key_of(entry[1]), used_s)

    def _entry(self, block_id: int, key: int) -> CachedBlock:
        cached = self.record.cached
        entry = cached[block_id] if 0 <= block_id < len(cached) else None
        if entry is None or not entry[0] or key_of(entry[0]) != key:
            raise CommandError(409, "this prefix has left the KV cache")
        return entry

    def _tokens(self, block_id: int, key: int) -> list[int] | None:
        try:
            self._entry(block_id, key)
        except CommandError:
            return None
        return self.record.tokens(block_id)

    def _kept(self, block_ids: Sequence[int]) -> list[int | None]:
        how_kept = getattr(self._pool.free_block_queue, "how_kept", lambda block: 0)
        blocks = (self._pool.blocks[each] for each in block_ids)
        return [None if block.ref_cnt else how_kept(block) for block in blocks]

    def _running(self, request: Any) -> tuple[str, list[int]]:
        record = self.record
        ends = [request.num_computed_tokens]
        plan = getattr(request, "relay_plan", None)
        if plan is not None:
            ends += [end for end in plan.first_slots[1:] if end < request.num_computed_tokens]
        keys = {key_of(record.hash_at(request, end)) for end in ends} - {NO_KEY}
        return request.request_id, list(keys)

    def _stats(self) -> dict[str, Any]:
        scheduler, record = self._scheduler, self.record
        long_contexts = getattr(scheduler, "relay_long_contexts", None)
        return {
            "memory_blocks": self._memory(),
            "long_context_bytes": (
                None if long_contexts is None else long_contexts.gauges()["host_kv_bytes"]
            ),
            "prefix_hit_tokens": record.hit_tokens,
            "prefix_query_tokens": record.query_tokens,
            "kv_tokens_read": self._kv_tokens_read,
            "kv_tokens_logical": self._kv_tokens_logical,
            "running": len(scheduler.running),
            "waiting": self._waiting(),
        }

    def _memory(self) -> dict[str, int]:
        """Each block is counted once: pinned before modules before running."""
        pool, managers = self._pool, self._manager.coordinator.single_type_managers
        pins = getattr(self._scheduler, "pins", None)
        held = pins.held_blocks if pins is not None else frozenset[int]()
        total, free = pool.num_gpu_blocks - 1, pool.get_num_free_blocks()
        num_used = total - free
        num_filling = sum(
            len(manager.req_to_blocks.get(request.request_id, ()))
            - manager.num_cached_block.get(request.request_id, 0)
            for manager in managers
            for request in self._scheduler.running
        )
        # a block that is being filled is its request's alone, and is found by nobody yet
        num_unused = max(self.record.num_cached - max(num_used - num_filling, 0), 0)
        modules = self.record.module_blocks - held if self.record.module_blocks else set()
        used_modules = sum(pool.blocks[block_id].ref_cnt > 0 for block_id in modules)
        cached = min(num_unused, free)
        return {
            "total": total,
            "running": max(num_used - len(held) - used_modules, 0),
            "cached": cached - (len(modules) - used_modules),
            "pinned": len(held),
            "modules": len(modules),
            "free": free - cached,
        }

    def _waiting(self) -> dict[str, int]:
        waiting = self._scheduler.waiting
        num_all = len(waiting) + len(getattr(self._scheduler, "kv_holding_waiting", ()))
        held = getattr(waiting, "held_requests", 0)
        blocked = getattr(waiting, "blocked_requests", 0)
        found = {"prefix": held, "blocked": blocked, "capacity": num_all - held - blocked}
        return {reason: count for reason, count in found.items() if count > 0}
