# SPDX-License-Identifier: Apache-2.0
import itertools
import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.depth import cases
from vllm_relay.tables.ordering.cached_tokens import BlockCache, block_hashes, cached_tokens
from vllm_relay.tables.ordering.sequences import TokenSequences

prompt_lists = st.lists(st.lists(st.integers(0, 1), max_size=14), max_size=14)


def plain_cached_tokens(prompts, block_size, num_blocks):
    """vLLM's block pool with lists: blocks in the order in which they are taken, each with what it
    holds and when it was filled. Of two that hold the same, the first one filled is read."""
    queue: list[tuple[tuple[int, ...] | None, int]] = [(None, 0)] * num_blocks
    clock = itertools.count()
    found = []
    for prompt in prompts:
        full = [tuple(prompt[: end + block_size]) for end in range(0, len(prompt), block_size)]
        partial = len(prompt) % block_size > 0
        contents = full[:-1] if partial else full
        held = {content for content, _ in queue}
        hits = 0
        while (hits + 1) * block_size < len(prompt) and contents[hits] in held:
            hits += 1
        used = [min(block for block in queue if block[0] == content) for content in contents[:hits]]
        for block in used:
            queue.remove(block)
        del queue[: len(full) - hits]
        used += [(content, next(clock)) for content in contents[hits:]]
        queue = [(None, 0)] * partial + queue + used[::-1]
        assert len(queue) == num_blocks
        found.append(hits * block_size)
    return found


@example([[0], [0], [1, 0], [0, 0, 0], [0, 0], [1, 0, 0]], 1, 3)  # the first copy is freed last
@settings(max_examples=cases(75))
@given(prompt_lists, st.integers(1, 4), st.one_of(st.none(), st.integers(0, 12)))
def test_a_plain_block_pool_finds_the_same(prompts, block_size, spare_blocks):
    needed = max((-(-len(prompt) // block_size) for prompt in prompts), default=0)
    num_blocks = None if spare_blocks is None else max(1, needed + spare_blocks)
    found = cached_tokens(TokenSequences.from_lists(prompts), BlockCache(block_size, num_blocks))
    unlimited = 14 * 14 + 1
    assert found.tolist() == plain_cached_tokens(prompts, block_size, num_blocks or unlimited)


@given(prompt_lists, st.integers(1, 4))
def test_prompts_in_parts(prompts, block_size):
    cache = BlockCache(block_size)
    parts = [TokenSequences.from_lists(prompts[begin : begin + 3]) for begin in range(0, 14, 3)]
    whole = cached_tokens(TokenSequences.from_lists(prompts), cache)
    assert cached_tokens(iter(parts), cache).tolist() == whole.tolist()


def test_known_counts():
    prefix = list(range(8))
    prompts = TokenSequences.from_lists([prefix, [*prefix, 9], prefix, prefix[:7], [9, *prefix]])
    assert cached_tokens(prompts, BlockCache(4)).tolist() == [0, 8, 4, 4, 0]
    assert cached_tokens(prompts, BlockCache(1)).tolist() == [0, 8, 7, 6, 0]
    assert cached_tokens(prompts, BlockCache(16)).tolist() == [0] * 5


def test_a_cycle_longer_than_the_cache_is_lost():
    prompts = TokenSequences.from_lists([[number, 0, 0] for number in range(5)] * 3)
    assert cached_tokens(prompts, BlockCache(2, 10)).sum() == 20
    assert cached_tokens(prompts, BlockCache(2, 5)).sum() == 0


def test_hits_grow_with_the_cache():
    rng = random.Random(0)
    prompts = [[rng.randrange(3) for _ in range(rng.randrange(30))] for _ in range(300)]
    sequences = TokenSequences.from_lists(prompts)
    sums = [int(cached_tokens(sequences, BlockCache(2, n)).sum()) for n in (15, 30, 100, 9999)]
    assert sums == sorted(sums)
    assert sums[-1] == int(cached_tokens(sequences, BlockCache(2)).sum())


def test_hashes_stand_for_all_tokens_before():
    rng = np.random.default_rng(0)
    lists = [rng.integers(0, 2, 8).tolist() for _ in range(300)]
    hashes = block_hashes(TokenSequences.from_lists(lists), 2).reshape(-1, 4)
    for depth in range(4):
        contents = {tuple(tokens[: 2 * depth + 2]) for tokens in lists}
        assert len(np.unique(hashes[:, depth])) == len(contents)
    assert len(np.unique(hashes)) == sum(
        len({tuple(tokens[:end]) for tokens in lists}) for end in (2, 4, 6, 8)
    )


def test_refused():
    with pytest.raises(ValueError, match="block_size_tokens=0 given"):
        BlockCache(0)
    with pytest.raises(ValueError, match="num_blocks=0 given"):
        BlockCache(16, 0)
    with pytest.raises(ValueError, match="9 tokens needs 3 blocks of 4 tokens, the cache has 2"):
        cached_tokens(TokenSequences.from_lists([[1] * 9]), BlockCache(4, 2))
