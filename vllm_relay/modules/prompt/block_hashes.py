# SPDX-License-Identifier: Apache-2.0
"""The names under which the prefix cache keeps the blocks of modular prompts.

vLLM chains the hash of a block to all blocks before it, as their tokens see all before them. The
tokens of a segment see its context and nothing else, so its blocks are chained to that: equal names
mean equal keys and values, wherever the segment stands in a prompt and whatever else is in it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from vllm_relay.modules.prompt.plan import ModulePlan, Segment, plan_of_request

HashFunction = Callable[[Any], bytes]


class PlannedHashes:
    """Hashes the blocks of one request.

    Args:
        token_ids: of the prompt, padding included.
        extra_keys: what else its keys and values depend on: its adapter, its salt.
    """

    def __init__(
        self,
        plan: ModulePlan,
        token_ids: Sequence[int],
        hash_function: HashFunction,
        extra_keys: tuple[Any, ...],
    ) -> None:
        self._plan = plan
        self._hash = hash_function
        self._extra_keys = extra_keys
        self._contents = [
            plan.segment_tokens(index, token_ids) for index in range(len(plan.segments))
        ]
        self._positions = [each.positions(each.num_tokens) for each in plan.segments]
        self._digests: dict[tuple[int, int], bytes] = {}
        *runs, (first, _, visible) = plan.computed_runs()
        self._runs = [*runs, (first, sys.maxsize, visible)]  # generated tokens go on with the last

    def block(self, number: int, token_ids: Sequence[int], previous: bytes | None) -> bytes:
        """The hash of the block at this place of the request.

        Args:
            token_ids: of this block.
            previous: the hash of the block before; used where that is a block of the tail.
        """
        size, first_slots = self._plan.block_size, self._plan.first_slots
        slot = number * size
        if slot >= first_slots[-1]:
            return self._tail_block(slot, token_ids, previous if slot > first_slots[-1] else None)
        index = max(each for each, first in enumerate(first_slots[:-1]) if first <= slot)
        return self._segment_digest(index, slot + size - first_slots[index])

    def _segment_digest(self, index: int, end: int) -> bytes:
        """Of the tokens of a segment up to an offset, as far as they decide its keys and values."""
        segment = self._plan.segments[index]
        end = min(end, segment.num_tokens)
        if (index, end) not in self._digests:
            size = self._plan.block_size
            begin = (end - 1) // size * size
            parent = self._segment_digest(index, begin) if begin else self._context(segment)
            tokens = tuple(self._contents[index][begin:end])
            positions = tuple(self._positions[index][begin:end])
            self._digests[index, end] = self._hash((parent, tokens, positions))
        return self._digests[index, end]

    def _context(self, segment: Segment) -> bytes:
        seen = tuple(
            (self._segment_digest(index, visible), self._unseen(index, visible))
            for index, visible in segment.context
        )
        return self._hash(("relay module", self._extra_keys, seen))

    def _unseen(self, index: int, visible: int) -> tuple[tuple[int, int], ...]:
        """What others do not see of the first tokens of a segment."""
        placeholders = self._plan.segments[index].placeholders
        return tuple((begin, min(end, visible)) for begin, end in placeholders if begin < visible)

    def _tail_block(self, slot: int, token_ids: Sequence[int], previous: bytes | None) -> bytes:
        seen: list[Any] = []  # by the tokens of this block, and of what segments
        for first, end, visible in self._runs:
            if first < slot + len(token_ids) and end > slot:
                stored = tuple(
                    (self._segment_digest(index, each), self._unseen(index, each),
                     self._plan.segments[index].replaced)
                    for index, each in enumerate(visible)
                    if each
                )  # fmt: skip
                seen.append((max(first - slot, 0), stored))
        parent = previous or self._hash(("relay tail", self._extra_keys))
        begin = slot - self._plan.first_slots[-1]
        positions = self._plan.positions_from(begin, len(token_ids))
        return self._hash((parent, tuple(token_ids), tuple(positions), tuple(seen)))


def module_block_hasher(
    chained: Callable[[Any], list[Any]], hash_block_size: int, hash_function: HashFunction
) -> Callable[[Any], list[Any]]:
    """A hasher of vLLM's requests that knows plans; see `vllm_changes.engine_core.hash_blocks_by`.

    Args:
        chained: vLLM's own, for other requests.
    """

    def new_block_hashes(request: Any) -> list[Any]:
        plan = plan_of_request(request)
        if plan is None:
            return chained(request)
        known = len(request.block_hashes)
        if (known + 1) * hash_block_size > request.num_tokens:
            return []
        hashes = getattr(request, "relay_hashes", None)
        if hashes is None:
            hashes = request.relay_hashes = PlannedHashes(
                plan, request.prompt_token_ids, hash_function, _extra_keys(request)
            )
        new: list[Any] = []
        previous = request.block_hashes[-1] if known else None
        for number in range(known, request.num_tokens // hash_block_size):
            begin = number * hash_block_size
            tokens = request.all_token_ids[begin : begin + hash_block_size]
            previous = hashes.block(number, tokens, previous)
            new.append(previous)
        return new

    return new_block_hashes


def _extra_keys(request: Any) -> tuple[Any, ...]:
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

    keys, _ = generate_block_hash_extra_keys(request, 0, 1, 0)
    return keys or ()
