# SPDX-License-Identifier: Apache-2.0
"""The work list: everything is read exactly once, and merged in the order that cuts prescribe."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention_backends.plan_checks import check_plan
from tests.attention_backends.strategies import random_problem
from tests.attention_backends.triton_problems import TINY_CUTS, plan_of, setup_of, tree_problem
from tests.support.depth import cases
from vllm_relay.attention_backends.cuda.config import KernelConfig, KernelSetup
from vllm_relay.attention_backends.cuda.plans.plan_cuts import (
    MODE_DIRECT,
    MODE_FOLD,
    MODE_SEGMENTS,
    MODE_TILES,
    deal,
)
from vllm_relay.attention_backends.forest import Forest

SEEDS = st.integers(0, 2**32 - 1)


@st.composite
def configs(draw):
    tile = 16 * draw(st.sampled_from([1, 2, 4]))
    segment = tile * draw(st.integers(1, 5))
    return KernelConfig(
        tile_tokens=tile,
        segment_tokens=segment,
        section_tokens=segment * draw(st.integers(1, 5)),
        small_rows=16,
        large_rows=draw(st.sampled_from([16, 32, 64])),
        start_tokens=draw(st.sampled_from([0.0, 32.0])),
    )


@settings(max_examples=cases(60))
@given(seed=SEEDS, config=configs(), num_programs=st.sampled_from([1, 2, 5, 30, 400]))
def test_everything_is_read_once(seed, config, num_programs):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, max_tokens=2000, block_size=int(rng.choice([16, 32, 48, 128])))
    config = setup_of(problem, config).config
    everything = problem.forest()
    some = everything.without(rng.random(len(everything.nodes)) < 0.5)
    for forest in (None, everything, some):
        plan = plan_of(problem, forest, config=config, num_programs=num_programs)
        check_plan(plan, problem, config)


def test_numbers_of_a_small_plan():
    """Three requests share 80 tokens, two of them 32 more; four query heads per kv head. Segments
    are of 64 tokens, sections of 128."""
    problem = tree_problem(
        [[("a", 5)], [("a", 5), ("b", 2)], [("a", 5), ("b", 2)], []],
        tails=[1, 7, 60, 20],
        query_lens=[1, 1, 3, 1],
        heads=(4, 1),
    )
    plan = plan_of(problem, problem.forest(), num_programs=1)
    order = plan.entries[:, 0].tolist()
    first = order.index(0)
    # of 80 tokens: the segment up to 64 and what is left; of 32 tokens from 80 on: two tiles; then
    # one tile or four, of which the last is a segment that begins at 128
    slots = {0: 2 + 1, 1: 2 + 2 + 1, 2: 2 + 2 + 2, 5: 0}
    counts = np.diff(np.append(plan.entries[:, 3], plan.num_slots)).tolist()
    assert {token: counts[order.index(token)] for token in slots} == slots
    shared = [item for item in plan.items.tolist() if item[3] == 20]
    assert [item[2:6] + item[6:] for item in sorted(shared, key=lambda item: item[4])] == [
        [0, 20, 0, 64, 0, MODE_FOLD], [0, 20, 64, 80, 1, MODE_SEGMENTS],
    ]  # fmt: skip
    pair = [item for item in plan.items.tolist() if item[3] == 16]
    assert [item[4:] for item in pair] == [[80, 112, 2, MODE_TILES]]
    alone = [item for item in plan.items.tolist() if item[0] == 3]
    assert [item[2:] for item in alone] == [[0, 4, 0, 20, 0, MODE_DIRECT]]
    assert [80, 81, 2, MODE_TILES] in [item[4:] for item in plan.items.tolist() if item[1] == first]


def test_work_is_cut_until_every_program_has_its_share():
    problem = tree_problem([[("a", 64)]] * 3, heads=(4, 1))
    sizes = []
    for num_programs in (1, 4, 16, 64):
        plan = plan_of(problem, problem.forest(), num_programs=num_programs)
        check_plan(plan, problem, TINY_CUTS)
        sizes.append(int((plan.items[:, 5] - plan.items[:, 4]).max()))
    assert sizes == [128, 128, 64, 32]


def test_work_is_cut_no_finer_than_fits():
    problem = tree_problem([[("a", 64)]] * 3, heads=(4, 1))

    def num_slots(most: int | None, num_programs: int = 64) -> int:
        plan = plan_of(problem, problem.forest(), num_programs=num_programs, max_slots=most)
        return plan.num_slots

    finest, uncut = num_slots(None), num_slots(None, num_programs=1)
    assert uncut <= num_slots(finest - 1) < finest
    assert num_slots(uncut) == uncut


def test_ends_of_shared_ranges_are_rounded_down_to_tiles():
    problem = tree_problem([[("a", 2)]] * 2, tails=[30, 30], block_size=48)
    order = np.arange(2, dtype=np.int32)
    plan = plan_of(problem, Forest(order, np.array([[0, 2, 0, 95, 1]], np.int32)))
    assert plan.items[plan.items[:, 3] == 4, 5].max() == 80
    plan = plan_of(problem, Forest(order, np.array([[0, 2, 0, 15, 1]], np.int32)))
    assert (plan.items[:, 3] == 2).all()


def test_only_short_private_ranges_are_direct():
    lengths = [1, 64, 65, 128, 200]
    problem = tree_problem([[]] * len(lengths), tails=lengths)
    plan = plan_of(problem, num_programs=1)
    has_slots = np.diff(np.append(plan.entries[:, 3], plan.num_slots)) > 0
    assert has_slots.tolist() == [False, False, True, True, True]
    assert (plan.items[:, 7] == MODE_DIRECT).sum() == 2


@pytest.mark.parametrize(("window", "begin"), [(1, 192), (8, 192), (9, 128), (500, 0)])
def test_private_ranges_begin_with_the_segment_that_the_window_sees(window, begin):
    problem = tree_problem([[]], tails=[200], features={"sliding_window": window})
    assert plan_of(problem).items[:, 4].min() == begin


def test_what_no_window_sees_is_not_read():
    problem = tree_problem(
        [[("a", 20)]] * 3, tails=[1, 5, 90], features={"sliding_window": 40}, heads=(4, 1)
    )
    plan = plan_of(problem, problem.forest())
    check_plan(plan, problem, TINY_CUTS)
    assert plan.items[:, 4].min() == 256  # the last but one segment of 320 tokens


def test_plans_of_any_depth():
    nodes = [[0, 2, 16 * level, 16 * level + 16, 0] for level in range(40)]
    problem = tree_problem([[("a", 40)]] * 2)
    forest = Forest(np.arange(2, dtype=np.int32), np.array(nodes, np.int32))
    check_plan(plan_of(problem, forest), problem, TINY_CUTS)


def test_empty_batch():
    plan = plan_of(tree_problem([]))
    assert plan.num_slots == 0 and not len(plan.works)
    assert plan.packed(3)[:5].tolist() == [5, 21, 26, 26, 26]


@settings(max_examples=cases(60))
@given(seed=SEEDS, num_programs=st.sampled_from([1, 2, 7, 100]), num_kv_heads=st.integers(1, 3))
def test_work_goes_to_the_program_that_has_least(seed, num_programs, num_kv_heads):
    rng = np.random.default_rng(seed)
    num_items, num_kv_heads = int(rng.integers(1, 300)), min(num_kv_heads, num_programs)
    item_ns, is_large = rng.random(num_items) + 0.1, rng.integers(0, 2, num_items)
    config = KernelConfig(small_rows=16, large_rows=32)
    setup = KernelSetup(config, config.cost(128, 2), num_kv_heads, num_kv_heads, 128, num_programs)
    works, starts, loads = deal(item_ns, is_large, setup)
    expected: list[list[int]] = [[] for _ in range(2 * num_programs)]
    busy_ns = [0.0] * num_programs
    works_left = [
        (item, head)
        for item in sorted(range(num_items), key=lambda item: -item_ns[item])
        for head in range(num_kv_heads)
    ]
    while works_left:
        # one each for those that would not be busier than the first of them becomes
        most_ns = min(busy_ns) + item_ns[works_left[0][0]]
        for program in sorted(range(num_programs), key=busy_ns.__getitem__):
            if not works_left or busy_ns[program] > most_ns:
                break
            item, head = works_left.pop(0)
            busy_ns[program] += item_ns[item]
            expected[2 * program + 1 - is_large[item]].append(item * num_kv_heads + head)
    assert loads.tolist() == busy_ns
    parts = [works[begin:end].tolist() for begin, end in itertools.pairwise(starts.tolist())]
    assert parts == expected
