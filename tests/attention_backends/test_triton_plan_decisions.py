# SPDX-License-Identifier: Apache-2.0
"""What planning on the device keeps of all that could be shared, and what it counts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention_backends.device_plans import (
    Groups,
    attend_as_planned,
    check_device_plan,
    counted,
    groups_of,
    make_planner,
    plan_and_attend,
    update,
)
from tests.attention_backends.exactness import assert_same_bits
from tests.attention_backends.strategies import AttentionProblem, random_problem
from tests.attention_backends.triton_interpreter import programs_in_order
from tests.attention_backends.triton_problems import (
    TINY_CUTS,
    paths_of_levels,
    solve,
    tree_problem,
)
from tests.support.depth import cases
from vllm_relay.attention_backends.cuda import plan as gpu_plan
from vllm_relay.attention_backends.cuda.kernels import plan as triton_plan
from vllm_relay.attention_backends.cuda.planner import DevicePlanner
from vllm_relay.attention_backends.cuda.totals import TotalsReader

SEEDS = st.integers(0, 2**32 - 1)


def groups_that_pay(
    everything: Groups, problem: AttentionProblem, planner: DevicePlanner, min_shared_tokens: int
) -> Groups:
    """The rule of decide_kernel, group by group instead of request by request: reading the range
    once instead of once for each child, against the states that it leaves."""
    config, group_size = planner.config, planner.group_size
    query_lens = problem.query_lens.tolist()
    covered = [0] * problem.num_requests
    depth = [0] * problem.num_requests
    kept = set()
    for members, _, end in sorted(everything, key=lambda group: group[2]):
        below = [other for other, *_ in everything if other < members]
        child_groups = [other for other in below if not any(other < between for between in below)]
        children = len(child_groups) + len(members.difference(*child_groups))
        some_member = min(members)
        begin = covered[some_member]
        segment_rest = -end % config.segment_tokens
        states = 1 + -(-segment_rest // config.tile_tokens)
        entries = sum(query_lens[member] for member in members)
        saved = (children - 1) * (end - begin) * planner.token_cost
        spent = entries * group_size * states * planner.state_cost
        spent += planner.token_cost * config.start_tokens
        if saved < spent or end < min_shared_tokens or depth[some_member] == gpu_plan.MAX_DEPTH:
            continue
        kept.add((members, begin, end))
        for member in members:
            covered[member] = end
            depth[member] += 1
    return kept


@settings(max_examples=cases(7))
@given(
    seed=SEEDS,
    state_cost=st.sampled_from([0.25, 1.0, 4.0]),
    start_tokens=st.sampled_from([0.0, 16.0, 64.0]),
    min_shared_tokens=st.sampled_from([0, 0, 48, 100]),
)
def test_what_pays_is_kept_and_nothing_else(seed, state_cost, start_tokens, min_shared_tokens):
    rng = np.random.default_rng(seed)
    problem = random_problem(
        rng,
        max_requests=10,
        max_tokens=800,
        heads=(int(rng.choice([1, 4])), 1),
        head_size=32,
        block_size=16,
        use_features=False,
    )
    config = replace(TINY_CUTS, state_cost=state_cost, start_tokens=start_tokens)
    planner = make_planner(problem, config=config, rng=rng, max_seq_len=8192)
    update(planner, problem, everything=True)
    everything = groups_of(planner, problem)
    with programs_in_order(rng):
        update(planner, problem, min_shared_tokens=min_shared_tokens)
    assert groups_of(planner, problem) == groups_that_pay(
        everything, problem, planner, min_shared_tokens
    )
    check_device_plan(planner, problem)
    update(planner, problem, shares=False, everything=True)
    assert groups_of(planner, problem) == set()


def test_long_prefixes_pay_and_short_ones_do_not():
    """Two requests, 16 heads each: a state is as large as the keys and values of two tokens."""
    for blocks, pays in ((2, False), (4, False), (8, True), (40, True)):
        problem = tree_problem([[("a", blocks)]] * 2, heads=(16, 1), head_size=128)
        planner = make_planner(problem)
        update(planner, problem)
        assert bool(groups_of(planner, problem)) == pays


@pytest.mark.parametrize("min_shared_tokens", [0, 96, 97])
def test_least_tokens_to_share(min_shared_tokens):
    problem = tree_problem([[("a", 6)]] * 3)
    planner = make_planner(problem, config=replace(TINY_CUTS, state_cost=0.01, start_tokens=0.0))
    update(planner, problem, min_shared_tokens=min_shared_tokens)
    assert bool(groups_of(planner, problem)) == (min_shared_tokens <= 96)


def test_chains_end_at_their_greatest_depth():
    """Every request goes one node deeper than the one before."""
    depth = gpu_plan.MAX_DEPTH + 3
    nodes = [(f"{level}", 2) for level in range(depth + 1)]
    problem = tree_problem([nodes[: last + 1] for last in range(depth + 1)], heads=(1, 1))
    planner = make_planner(problem, max_seq_len=4096)
    result = plan_and_attend(planner, problem, everything=True)
    assert_same_bits(result, solve(problem))
    lengths = planner.plan.chain_length.tolist()
    assert lengths[: gpu_plan.MAX_DEPTH] == list(range(2, gpu_plan.MAX_DEPTH + 2))
    assert set(lengths[gpu_plan.MAX_DEPTH :]) == {gpu_plan.MAX_DEPTH + 1}
    check_device_plan(planner, problem)
    assert counted(planner, "MAX_CHAIN") == gpu_plan.MAX_DEPTH


@pytest.fixture
def tree() -> AttentionProblem:
    return tree_problem(
        paths_of_levels([1, 2, 4], [16, 3, 1]), tails=[1, 20, 40, 7], query_lens=[1, 2, 1, 3]
    )


@pytest.mark.parametrize(
    ("limit", "needed"), [("max_slots", "SECTION_SLOTS"), ("max_items", "SECTION_ITEMS")]
)
def test_what_does_not_fit_is_not_shared(tree, limit, needed):
    planner = make_planner(tree)
    alone = solve(tree)
    assert_same_bits(plan_and_attend(planner, tree, everything=True), alone)
    groups = groups_of(planner, tree)
    assert len(groups) == 3
    fits = counted(planner, needed)
    for capacity, expected in ((fits, groups), (fits - 1, set())):
        setattr(planner, limit, capacity)
        assert_same_bits(plan_and_attend(planner, tree, everything=True), alone)
        assert groups_of(planner, tree) == expected
        if expected:
            check_device_plan(planner, tree)


def test_groups_without_room_for_their_members_are_left_out(tree):
    """7 query tokens in the group of all, 3 and 4 in the others: room for one or two groups."""
    planner = make_planner(tree)
    alone = solve(tree)
    for room in (14, 13, 9, 2):
        planner.max_members = planner.limits.max_tokens + room
        assert_same_bits(plan_and_attend(planner, tree, everything=True), alone)
        groups = groups_of(planner, tree)
        sizes = [sum(tree.query_lens[list(members)].tolist()) for members, *_ in groups]
        assert sum(sizes) <= room and (len(groups) == 3) == (room == 14)
        assert bool(groups) == (room > 2)
        check_device_plan(planner, tree)


@pytest.mark.parametrize(
    ("limit", "needed"), [("max_slots", "SEGMENT_SLOTS"), ("max_items", "SEGMENT_ITEMS")]
)
def test_work_is_cut_as_fine_as_fits(tree, limit, needed):
    """Segments for many programs, if they fit; sections for few."""
    alone = solve(tree)
    planner = make_planner(tree)
    for capacity, folds in ((None, 0), (0, 0), (-1, 1)):
        if capacity is not None:
            setattr(planner, limit, counted(planner, needed) + capacity)
        planner.num_programs = 1000
        update(planner, tree, everything=True)
        planner.num_programs = 3
        assert_same_bits(attend_as_planned(planner, tree), alone)
        assert planner.plan.ranges[tree.num_requests : 2 * tree.num_requests, 4].eq(folds).all()
        assert len(groups_of(planner, tree)) == 3
    few = make_planner(tree, num_programs=1)
    assert_same_bits(plan_and_attend(few, tree, everything=True), alone)
    assert few.plan.ranges[tree.num_requests : 2 * tree.num_requests, 4].eq(1).all()


@triton.jit
def _count_kernel(
    ranges_ptr, counts_ptr, TILE: tl.constexpr, SEGMENT: tl.constexpr, SECTION: tl.constexpr
):
    case = tl.program_id(0)
    begin = tl.load(ranges_ptr + 3 * case)
    end = tl.load(ranges_ptr + 3 * case + 1)
    folds = tl.load(ranges_ptr + 3 * case + 2) != 0
    num_pieces, slots = triton_plan._num_pieces_and_slots(begin, end, folds, TILE, SEGMENT, SECTION)
    tl.store(counts_ptr + 2 * case, num_pieces)
    tl.store(counts_ptr + 2 * case + 1, slots)


@pytest.mark.parametrize("sizes", [(16, 32, 128), (16, 16, 16), (32, 96, 96), (16, 48, 240)])
def test_pieces_are_counted_as_they_are_cut(sizes):
    tile, segment, section = sizes
    config = replace(TINY_CUTS, tile_tokens=tile, segment_tokens=segment, section_tokens=section)
    rng = np.random.default_rng(segment)
    begins = rng.integers(0, 3 * section // tile, 250) * tile
    ends = begins + rng.integers(0, 3 * section, 250)
    cases = np.stack((begins, ends, rng.integers(0, 2, 250)), 1).astype(np.int32)
    counts = torch.zeros((250, 2), dtype=torch.int32)
    _count_kernel[(250,)](torch.from_numpy(cases), counts, *sizes)
    for (begin, end, folds), counted_pieces in zip(cases.tolist(), counts.tolist(), strict=True):
        cut = list(gpu_plan.pieces(begin, end, config, bool(folds)))
        assert counted_pieces == [len(cut), sum(slots for *_, slots in cut)], (begin, end, folds)


def test_totals_are_read_now_and_then(tree):
    """Those of the first step at the second, those of the next two at the fourth."""
    planner = make_planner(tree)
    reader = TotalsReader(planner, every_steps=2)
    answers = []
    for options in ({"everything": True}, {"everything": True}, {"shares": False}, {}):
        update(planner, tree, **options)
        if options == {"everything": True}:
            shared = groups_of(planner, tree)
        answers.append(reader.step())
    first, second = answers[1], answers[3]
    assert answers == [None, first, None, second]
    tokens = int(tree.seq_lens.sum())
    saved = sum((len(members) - 1) * (end - begin) for members, begin, end in shared)
    for stats, steps, groups, depth in ((first, 1, 3, 2), (second, 2, 0, 0)):
        assert (stats.steps, stats.groups, stats.forest_depth) == (steps, groups, depth)
        assert (stats.requests, stats.requests_shared) == (4 * steps, 4)
        assert stats.kv_tokens_logical == steps * tokens
        assert stats.kv_tokens_read == steps * tokens - saved


def test_totals_do_not_count_what_did_not_fit(tree):
    planner = make_planner(tree)
    planner.max_slots = 0
    update(planner, tree, everything=True)
    assert planner.totals.tolist()[:7] == [1, 4, 0, int(tree.seq_lens.sum()), 0, 0, 0]
