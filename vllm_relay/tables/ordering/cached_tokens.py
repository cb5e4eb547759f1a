# SPDX-License-Identifier: Apache-2.0
"""How many prompt tokens vLLM's prefix cache finds, for prompts that run one after the other.

Only full blocks are cached, and the last token of a prompt is always computed. The block that was
used longest ago leaves first, of one prompt the last block first. A block is known by a hash of
64 bits of all tokens up to its end. Answers take no blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_relay.tables.ordering.sequences import TokenSequences, gather_indices

Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class BlockCache:
    """
    Attributes:
        block_size_tokens: of a KV block.
        num_blocks: that can hold tokens, one less than vLLM's ``num_gpu_blocks``, which counts a
            block that it keeps back; None has no limit.

    Raises:
        ValueError: a number is below 1.
    """

    block_size_tokens: int
    num_blocks: int | None = None

    def __post_init__(self) -> None:
        for name in ("block_size_tokens", "num_blocks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} given, expected at least 1")


def cached_tokens(prompts: TokenSequences | Iterable[TokenSequences], cache: BlockCache) -> Int64:
    """
    Args:
        prompts: in the order in which they run; in parts if they are many.
        cache: empty at first.

    Returns:
        Tokens found in the cache, int64 [prompts].

    Raises:
        ValueError: a prompt does not fit into the cache.
    """
    parts = [prompts] if isinstance(prompts, TokenSequences) else prompts
    size = cache.block_size_tokens
    hashes, lengths = [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
    for part in parts:
        hashes.append(block_hashes(part, size))
        lengths.append(part.lengths)
    num_tokens = np.concatenate(lengths)
    num_full = num_tokens // size
    begins = np.cumsum(num_full) - num_full
    numbers, seen_before = _number_blocks(np.concatenate(hashes), begins, num_full)
    hits = np.minimum(seen_before, np.maximum(num_tokens - 1, 0) // size)
    if cache.num_blocks is not None:
        num_held = -(-num_tokens // size)
        if num_held.max(initial=0) > cache.num_blocks:
            raise ValueError(
                f"a prompt of {num_tokens.max()} tokens needs {num_held.max()} blocks of {size} "
                f"tokens, the cache has {cache.num_blocks}: give a larger cache"
            )
        # one more for blocks that are not full: the next prompt gets it first
        if int((num_full - hits).sum()) + 1 > cache.num_blocks:
            hits = _hits_of_lru(numbers, begins, num_tokens, size, cache.num_blocks)
    return hits * size


def block_hashes(prompts: TokenSequences, block_size_tokens: int) -> UInt64:
    """A hash of all tokens up to the end of each full block, uint64 [full blocks of all]."""
    size = block_size_tokens
    num_full = prompts.lengths // size
    tokens = prompts.tokens[gather_indices(prompts.begins, num_full * size)]
    contents = tokens.reshape(-1, size).astype(np.uint64)
    contents += np.arange(1, size + 1, dtype=np.uint64) << np.uint64(32)
    hashes = _mixed(contents).sum(axis=1, dtype=np.uint64)
    begins = np.cumsum(num_full) - num_full
    longest_first = np.argsort(-num_full, kind="stable")
    ends = np.searchsorted(-num_full[longest_first], -np.arange(int(num_full.max(initial=0))))
    previous = np.zeros(len(prompts), np.uint64)
    for depth, num_active in enumerate(ends.tolist()):
        active = longest_first[:num_active]
        at = begins[active] + depth
        previous[active] = hashes[at] = _mixed(hashes[at] + _mixed(previous[active]))
    return hashes


def _mixed(values: UInt64) -> UInt64:
    """The finalizer of splitmix64 (Steele et al., 2014)."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _number_blocks(hashes: UInt64, begins: Int64, num_full: Int64) -> tuple[Int64, Int64]:
    """Numbers for hashes, and of each prompt the first blocks that earlier prompts have."""
    _, first, numbers = np.unique(hashes, return_index=True, return_inverse=True)
    prompt = np.repeat(np.arange(len(num_full)), num_full)
    seen = first[numbers] < begins[prompt]
    return numbers, np.bincount(prompt[seen], minlength=len(num_full))


def _hits_of_lru(
    numbers: Int64, begins: Int64, num_tokens: Int64, size: int, num_blocks: int
) -> Int64:
    """Blocks found by each prompt, int64 [prompts]."""
    free: OrderedDict[int, int] = OrderedDict.fromkeys(range(num_blocks), -1)
    """Block -> number of its content, -1 for none; the next to leave first."""
    cached: dict[int, list[int]] = {}
    """Number -> its blocks. A prompt that ends with a full block computes it again."""
    hits = np.zeros(len(begins), np.int64)
    spans = zip(begins.tolist(), num_tokens.tolist(), strict=True)
    for prompt, (begin, tokens) in enumerate(spans):
        contents = numbers[begin : begin + tokens // size].tolist()
        held: list[int] = []
        for content in contents[: max(tokens - 1, 0) // size]:
            found = cached.get(content)
            if found is None:
                break
            held.append(found[0])
        num_hits = len(held)
        for block in held:
            del free[block]
        for _ in range(-(-tokens // size) - num_hits):
            block, content = free.popitem(last=False)
            if content >= 0:
                same = cached[content]
                same.remove(block)
                if not same:
                    del cached[content]
            held.append(block)
        for block, content in zip(held[num_hits:], contents[num_hits:], strict=False):
            cached.setdefault(content, []).append(block)
        if len(held) > len(contents):
            block = held.pop()
            free[block] = -1
            free.move_to_end(block, last=False)
        for block, content in zip(reversed(held), reversed(contents), strict=True):
            free[block] = content
        hits[prompt] = num_hits
    return hits
