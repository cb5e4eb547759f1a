# SPDX-License-Identifier: Apache-2.0
"""Which replica holds which blocks."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_relay.cluster.replica_index import (
    NO_BLOCK,
    HeldBlocks,
    PredictedCaches,
    block_of,
    chain_of,
    numbers_of,
)

REPLICAS = 5
replicas = st.integers(0, REPLICAS - 1)
blocks = st.lists(st.integers(0, 30), max_size=30)


@given(st.lists(st.tuples(st.sampled_from(["add", "discard"]), replicas, blocks)), blocks)
def test_held_blocks_are_those_of_a_set_for_each_replica(
    changes: list[tuple[str, int, list[int]]], chain: list[int]
) -> None:
    held = HeldBlocks(REPLICAS, may_have_gaps=True)
    sets: list[set[int]] = [set() for _ in range(REPLICAS)]
    for what, replica, given_blocks in changes:
        if what == "add":
            new = held.add(replica, given_blocks)
            assert new == [
                each for each in dict.fromkeys(given_blocks) if each not in sets[replica]
            ]
            sets[replica] |= set(given_blocks)
        else:
            held.discard(replica, given_blocks)
            sets[replica] -= set(given_blocks)
    assert len(held) == len(set().union(*sets))
    for block in range(31):
        assert list(held.holders(block)) == [r for r in range(REPLICAS) if block in sets[r]]
        assert held.is_held(block) == any(block in each for each in sets)
    depths = []
    for each in sets:
        depth = 0
        while depth < len(chain) and chain[depth] in each:
            depth += 1
        depths.append(depth)
    ends = held.ends(chain)
    assert [depth for depth, _ in ends] == sorted(set(depths))
    found = {replica: depth for depth, bits in ends for replica in numbers_of(bits)}
    assert found == dict(enumerate(depths))


@given(st.lists(st.integers(0, 40), min_size=REPLICAS, max_size=REPLICAS), st.integers(0, 40))
def test_beginnings_of_long_prompts(num_held: list[int], length: int) -> None:
    held = HeldBlocks(REPLICAS)
    chain = list(range(100, 140))
    for replica, count in enumerate(num_held):
        held.add(replica, chain[:count])
    found = {
        replica: depth for depth, bits in held.ends(chain[:length]) for replica in numbers_of(bits)
    }
    assert found == {replica: min(count, length) for replica, count in enumerate(num_held)}


def test_chains_with_gaps() -> None:
    """Where every eighth block is held, and one before it is not."""
    chain = list(range(100, 140))
    for missing in range(40):
        held = HeldBlocks(2, may_have_gaps=True)
        held.add(0, chain[:missing] + chain[missing + 1 :])
        held.add(1, chain)
        assert held.ends(chain) == [(missing, 1), (40, 2)]


def naive_lru(num_blocks: int, chains: list[list[int]]) -> set[int]:
    used: OrderedDict[int, None] = OrderedDict()
    for chain in chains:
        for block in reversed(chain):
            used.pop(block, None)
            used[block] = None
        while len(used) > num_blocks:
            used.popitem(last=False)
    return set(used)


@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 4), st.integers(0, 20))),
    st.integers(1, 50),
)
def test_predicted_caches_keep_what_was_sent_last(
    sent: list[tuple[int, int, int]], num_blocks: int
) -> None:
    caches = PredictedCaches([num_blocks, 2 * num_blocks])
    chains: list[list[list[int]]] = [[], []]
    for replica, prefix, depth in sent:
        chain = [100 * prefix + level for level in range(depth)]
        caches.sent(replica, chain)
        chains[replica].append(chain)
    for replica in range(2):
        expected = naive_lru((replica + 1) * num_blocks, chains[replica])
        every = {100 * prefix + level for prefix in range(5) for level in range(20)}
        assert {block for block in every if caches.held.holds(replica, block)} == expected
    for prefix in range(5):
        chain = [100 * prefix + level for level in range(20)]
        found = {r: depth for depth, bits in caches.held.ends(chain) for r in numbers_of(bits)}
        for replica in range(2):
            held = [caches.held.holds(replica, block) for block in chain]
            assert held == [level < found[replica] for level in range(20)], "there are no gaps"
    caches.clear(0)
    assert not any(caches.held.holds(0, 100 * p + d) for p in range(5) for d in range(20))


def test_a_prompt_that_does_not_fit_keeps_its_beginning() -> None:
    caches = PredictedCaches([3])
    caches.sent(0, [1, 2, 3, 4, 5])
    assert caches.held.ends([1, 2, 3, 4, 5]) == [(3, 1)]


def test_blocks_of_hashes() -> None:
    assert block_of(b"\x01" + bytes(31)) == 1
    assert block_of(b"\xff" * 32) == 2**60 - 1
    assert block_of(2**64 + 7) == 7
    assert block_of(-1) == 2**60 - 1


@given(st.lists(st.integers(0, 3), max_size=12), st.integers(1, 4), st.integers(0, 12))
def test_a_block_tells_its_whole_prefix(tokens: list[int], size: int, changed: int) -> None:
    chain = chain_of(tokens, size)
    assert len(chain) == len(set(chain)) == len(tokens) // size
    assert all(0 < block < 2**60 for block in chain)
    half = len(chain) // 2
    after = chain[half - 1] if half else NO_BLOCK
    assert chain_of(tokens[half * size :], size, after) == chain[half:]
    if changed < len(chain) * size:
        other = [*tokens[:changed], 9, *tokens[changed + 1 :]]
        same = [a == b for a, b in zip(chain, chain_of(other, size), strict=True)]
        assert same == [depth < changed // size for depth in range(len(chain))]


def test_caches_without_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="expected at least 1 each"):
        PredictedCaches([4, 0])
