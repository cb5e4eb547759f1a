# SPDX-License-Identifier: Apache-2.0
"""The names under which the prefix cache keeps the blocks of modular prompts.

vLLM chains the hash of a block to all blocks before it, as their tokens see all before them. The
tokens of a segment see its context and nothing else, so its blocks are chained to that: equal names
mean equal keys and values, wherever the segment stands in a prompt and whatever else is in it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

from vllm_relay.modules.prompt.plan import ModulePlan, Ranges, Segment, plan_of_request

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
        self._contents = [plan.segment_tokens(i, token_ids) for i in range(len(plan.segments))]
        self._positions = [each.positions(each.num_tokens) for each in plan.segments]
        self._known: dict[tuple[int, int], bytes] = {}  # by segment and number of its tokens
        self._stored = [
            self._up_to(index, end)
            for index, segment in enumerate(plan.segments)
            for end in range(plan.block_size, plan.num_slots(segment) + 1, plan.block_size)
        ]
        self._tail_root = hash_function(("relay tail", extra_keys))
        self._seen: list[bytes] = []  # a digest of all that each run of the tail sees
        digest = b""
        for run in plan.tail:
            if run.sees:
                seen = tuple(
                    (index, self._segment(index, visible), plan.segments[index].replaced)
                    for index, visible in run.sees
                )
                digest = hash_function((digest, seen))
            self._seen.append(digest)

    def block(self, number: int, token_ids: Sequence[int], previous: bytes | None) -> bytes:
        """The hash of the block at this place of the request.

        Args:
            token_ids: of this block.
            previous: the hash of the block before; used where that is a block of the tail.
        """
        if number < len(self._stored):
            return self._stored[number]
        size, first_run = self._plan.block_size, self._plan.run_slots
        begin, end = number * size, number * size + len(token_ids)
        # generated tokens see what the last run sees
        first = min(bisect_right(first_run, begin), len(self._seen)) - 1
        seen: list[tuple[int, bytes]] = []  # by the tokens of this block
        for slot, digest in zip(first_run[first:], self._seen[first:], strict=False):
            if slot >= end:
                break
            seen.append((max(slot - begin, 0), digest))
        parent = previous if number > len(self._stored) else self._tail_root
        positions = self._plan.positions_from(begin - first_run[0], len(token_ids))
        return self._hash((parent, tuple(token_ids), tuple(positions), tuple(seen)))

    def _segment(self, index: int, visible: int) -> tuple[bytes, Ranges]:
        """Of the first tokens of a segment, and which of these others do not see."""
        placeholders = self._plan.segments[index].placeholders
        unseen = tuple((begin, min(end, visible)) for begin, end in placeholders if begin < visible)
        return self._up_to(index, visible), unseen

    def _up_to(self, index: int, end: int) -> bytes:
        """Of the first tokens of a segment, as far as they decide their keys and values."""
        segment = self._plan.segments[index]
        end = min(end, segment.num_tokens)
        if not end:
            return b""
        if (index, end) not in self._known:
            size = self._plan.block_size
            begin = (end - 1) // size * size
            parent = self._up_to(index, begin) if begin else self._context(segment)
            tokens = tuple(self._contents[index][begin:end])
            positions = tuple(self._positions[index][begin:end])
            self._known[index, end] = self._hash((parent, tokens, positions))
        return self._known[index, end]

    def _context(self, segment: Segment) -> bytes:
        seen = tuple(self._segment(index, visible) for index, visible in segment.context)
        return self._hash(("relay module", self._extra_keys, seen))


def module_block_hasher(
    chained: Callable[[Any], list[Any]], hash_block_size: int, hash_function: HashFunction
) -> Callable[[Any], list[Any]]:
    """A hasher of vLLM's requests that knows plans; `chained` is vLLM's own, for the others. See
    `vllm_changes.engine_core.hash_blocks_by`."""

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
