# SPDX-License-Identifier: Apache-2.0
from functools import cache
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.depth import cases
from vllm_relay.prefix_cache.eviction.belady import NEVER, belady_hits


def chain_of(path):
    """Keys that stand for whole prefixes."""
    return tuple(bytes(path[: end + 1]) for end in range(len(path)))


paths = st.lists(st.integers(0, 2), min_size=0, max_size=3)
tiny_workloads = st.lists(paths.map(chain_of), min_size=1, max_size=7)


def prefix_hits(chain, cached):
    return next((index for index, key in enumerate(chain) if key not in cached), len(chain))


def most_hits(chains, capacity_blocks):
    """Over all choices of what leaves, also of more than must, and of broken chains."""

    @cache
    def from_request(position, cached):
        if position == len(chains):
            return 0
        chain = frozenset(chains[position])
        others = cached - chain
        room = capacity_blocks - len(chain)
        return prefix_hits(chains[position], cached) + max(
            from_request(position + 1, chain | frozenset(kept))
            for num_kept in range(min(room, len(others)) + 1)
            for kept in combinations(sorted(others), num_kept)
        )

    return from_request(0, frozenset())


@settings(max_examples=cases(100))
@given(tiny_workloads, st.integers(0, 3))
def test_no_choice_has_more_hits(chains, spare_blocks):
    capacity_blocks = max(map(len, chains)) + spare_blocks
    assert belady_hits(chains, capacity_blocks) == most_hits(chains, capacity_blocks)


@settings(max_examples=cases(50))
@given(tiny_workloads)
def test_a_cache_for_all_blocks_reaches_the_ceiling(chains):
    capacity_blocks = len({key for chain in chains for key in chain})
    seen, expected = set(), 0
    for chain in chains:
        expected += prefix_hits(chain, seen)
        seen.update(chain)
    assert belady_hits(chains, NEVER) == belady_hits(chains, capacity_blocks) == expected


def test_a_cycle_that_lru_misses_always():
    chains = [chain_of([index]) for index in range(5)] * 4
    assert belady_hits(chains, 5) == 15
    assert belady_hits(chains, 4) == 12
    assert belady_hits(chains, 1) == 0


def test_a_request_larger_than_the_cache_is_refused():
    with pytest.raises(ValueError, match="3 blocks does not fit into 2 blocks"):
        belady_hits([chain_of([1, 2, 3])], 2)


def test_hits_grow_with_the_cache():
    rng = np.random.default_rng(0)
    chains = [chain_of(rng.integers(0, 3, rng.integers(1, 9)).tolist()) for _ in range(400)]
    hits = [belady_hits(chains, capacity) for capacity in range(8, 400, 20)]
    assert hits == sorted(hits) and hits[0] < hits[-1] <= belady_hits(chains, NEVER)
