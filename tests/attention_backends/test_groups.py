# SPDX-License-Identifier: Apache-2.0
"""Which groups of a forest pay, against all choices there are."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_relay.attention_backends.cost import KERNEL_COSTS, KernelCost
from vllm_relay.attention_backends.cuda.flash.nodes import FLASH_COST
from vllm_relay.attention_backends.forest import Forest
from vllm_relay.attention_backends.groups import that_pay

COSTS = [FLASH_COST, KERNEL_COSTS["avx512"], KERNEL_COSTS["amx_bf16"]]


def random_forest(rng: np.random.Generator, num_requests: int, max_nodes: int = 8) -> Forest:
    nodes: list[tuple[int, int, int, int, int]] = []

    def grow(first: int, last: int, begin: int, levels: int) -> None:
        if last - first < 2 or levels == 0 or len(nodes) == max_nodes:
            return
        end = begin + 16 * int(rng.integers(1, 12))
        nodes.append((first, last, begin, end, first))
        cuts = rng.integers(first + 1, last, rng.integers(1, 4)).tolist()
        for one, next_one in itertools.pairwise(sorted({first, last, *cuts})):
            if rng.integers(4):
                grow(one, next_one, end, levels - 1)

    grow(0, num_requests, 0, int(rng.integers(1, 6)))
    return Forest(np.arange(num_requests, dtype=np.int32), np.array(nodes, np.int32).reshape(-1, 5))


def cost_ns(forest: Forest, rows: np.ndarray, cost: KernelCost, tokens: int) -> float:
    """Of requests of `tokens` tokens each, range by range."""
    total = 0.0
    for first, last, begin, end, _ in forest.nodes.tolist():
        members = forest.order[first:last]
        total += float(cost.range_ns(rows[members].sum(keepdims=True), np.array([end - begin]))[0])
    return total + float((cost.token_ns(rows) * (tokens - forest.shared_tokens)).sum())


@given(seed=st.integers(0, 2**32 - 1), cost=st.sampled_from(COSTS))
def test_no_other_choice_costs_less(seed: int, cost: KernelCost) -> None:
    rng = np.random.default_rng(seed)
    num_requests = int(rng.integers(2, 24))
    forest = random_forest(rng, num_requests)
    rows = rng.integers(1, 40, num_requests)
    least = int(rng.integers(0, 200)) if rng.integers(2) else 0

    def of(removed: np.ndarray) -> float:
        return cost_ns(forest.without(removed), rows, cost, tokens=4096)

    too_short = forest.nodes[:, 3] < least
    choices = itertools.product([False, True], repeat=len(forest.nodes))
    best = min(of(np.array(choice, bool) | too_short) for choice in choices)
    found = that_pay(forest, rows, cost, least)
    assert cost_ns(found, rows, cost, tokens=4096) == pytest.approx(best, rel=1e-9)
    assert (found.nodes[:, 3] >= least).all()


def test_a_deep_tree_of_pairs_is_shared_on_some_of_its_levels() -> None:
    """No node saves more than a range costs to start where its children are kept too."""
    nodes = [
        (first, first + size, begin, begin + 128, first)
        for first in range(256)
        for level, size in enumerate((256, 128, 64, 32, 16, 8, 4, 2))
        for begin in [128 * level]
        if first % size == 0
    ]
    forest = Forest(np.arange(256, dtype=np.int32), np.array(nodes, np.int32))
    found = that_pay(forest, np.full(256, 4), FLASH_COST, 0)
    assert found.saved_tokens > 0.75 * forest.saved_tokens


@pytest.mark.parametrize("step_tokens", [16, 64, 256])
@pytest.mark.parametrize("cost", COSTS, ids=["flash", "avx512", "amx"])
def test_a_long_chain_costs_little_more_than_it_has_to(cost: KernelCost, step_tokens: int) -> None:
    """Each request begins like those behind it, and goes on alone before they do."""
    size = 200
    nodes = [
        (first, size, step_tokens * first, step_tokens * (first + 1), size - 1)
        for first in range(size - 1)
    ]
    forest = Forest(np.arange(size, dtype=np.int32), np.array(nodes, np.int32))
    rows = np.full(size, 4)
    together_ns = cost.token_ns(np.arange(size, 1, -1) * 4)
    start_ns = cost.start_ns(np.arange(size, 1, -1) * 4)
    alone_ns = cost.token_ns(np.array([4]))[0]

    # by where a node's range begins, in steps, from the innermost node outwards
    below = np.zeros(size)
    for index in reversed(range(size - 1)):
        tokens = step_tokens * (index + 1 - np.arange(index + 1))
        leavers = 2 if index == size - 2 else 1  # members that are in no node below
        kept = together_ns[index] * tokens + start_ns[index] + below[index + 1]
        left = leavers * alone_ns * tokens + below[: index + 1]
        below = np.append(np.minimum(kept, left), 0.0)
    least_ns = below[0]

    last = step_tokens * (size - 1)
    of_members = [min(step_tokens * (first + 1), last) for first in range(size)]
    found = that_pay(forest, rows, cost, 0)
    read_ns = sum(
        float(cost.range_ns(np.array([(node[1] - node[0]) * 4]), np.array([node[3] - node[2]]))[0])
        for node in found.nodes.tolist()
    )
    alone = np.array(of_members) - found.shared_tokens
    assert read_ns + alone_ns * alone.sum() <= 1.05 * least_ns
    assert found.depth < size - 1
