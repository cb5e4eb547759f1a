# SPDX-License-Identifier: Apache-2.0
"""Plans made on the device: the groups of the forest, and the results of every other plan."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention_backends.device_plans import (
    attend_as_planned,
    check_device_plan,
    groups_of,
    make_planner,
    plan_and_attend,
    update,
)
from tests.attention_backends.exactness import assert_same_bits
from tests.attention_backends.strategies import random_problem
from tests.attention_backends.triton_interpreter import programs_in_order
from tests.attention_backends.triton_problems import (
    TINY_CUTS,
    assert_exact_enough,
    cuda_cache,
    small_problem,
    solve,
    tree_problem,
)
from tests.support.depth import cases
from vllm_relay.attention_backends.forest import build_forest

SEEDS = st.integers(0, 2**32 - 1)


def forest_groups(problem, granule_tokens: int, max_query_len: int) -> set:
    """{(members, begin, end)} of `build_forest` over granules instead of blocks."""
    blocks = granule_tokens // problem.block_size
    table = problem.block_table.numpy()
    columns = table.shape[1] // blocks
    table = table[:, : columns * blocks].reshape(len(table), columns, blocks)
    ids: dict[tuple[int, ...], int] = {}
    granules = np.zeros(table.shape[:2], np.int32)
    for place in np.ndindex(granules.shape):
        granules[place] = ids.setdefault(tuple(table[place].tolist()), len(ids) + 1)
    query_lens = problem.query_lens.numpy()
    planned = (query_lens > 0) & (query_lens <= max_query_len)
    shareable = np.where(planned, problem.seq_lens.numpy() - query_lens + 1, 0)
    forest = build_forest(granules, shareable, granule_tokens)
    return {
        (frozenset(forest.order[first:last].tolist()), begin, end)
        for first, last, begin, end, _ in forest.nodes.tolist()
    }


@settings(max_examples=cases(7))
@given(seed=SEEDS)
def test_groups_are_those_of_the_forest(seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(
        rng, max_requests=9, max_tokens=600, heads=(4, 2), head_size=32, use_features=False,
        block_size=int(rng.choice([16, 32, 48])),
    )  # fmt: skip
    max_query_len = int(rng.choice([4, 64]))
    planner = make_planner(problem, max_query_len=max_query_len, max_seq_len=8192, rng=rng)
    with programs_in_order(rng):
        update(planner, problem, everything=True)
    assert groups_of(planner, problem) == forest_groups(
        problem, planner.granule_tokens, max_query_len
    )
    check_device_plan(planner, problem)


@settings(max_examples=cases(7))
@given(seed=SEEDS)
def test_nothing_is_shared_that_is_not_the_same(seed):
    """Rows over few block ids, also null: equal ids behind different ones, and at other columns."""
    rng = np.random.default_rng(seed)
    requests, width = int(rng.integers(1, 8)), int(rng.integers(1, 7))
    problem = tree_problem([[]] * requests, tails=[16 * width] * requests)
    table = rng.integers(rng.integers(2), 4, (requests, width), dtype=np.int32)
    problem = replace(problem, block_table=torch.from_numpy(table))
    planner = make_planner(problem, rng=rng)
    for _ in range(2):
        with programs_in_order(rng):
            update(planner, problem, everything=True)
        for members, begin, end in groups_of(planner, problem):
            assert len(members) > 1
            rows = table[sorted(members), : end // 16]
            assert (rows == rows[0]).all()
            assert (rows[0, end // 16 - 1] != 0).all() and begin < end
        check_device_plan(planner, problem)
        # hashes of this step stay behind for the next one
        order = rng.permutation(requests)
        table = table[order]
        shorter = torch.from_numpy(rng.integers(1, 16 * width + 1, requests).astype(np.int32))
        problem = replace(problem, block_table=torch.from_numpy(table), seq_lens=shorter)


@settings(max_examples=cases(3))
@given(seed=SEEDS)
def test_attention_is_that_of_requests_alone(seed):
    rng = np.random.default_rng(seed)
    problem = small_problem(rng)
    alone = solve(problem)
    planner = make_planner(problem, rng=rng, num_programs=int(rng.integers(1, 12)))
    for options in ({"everything": True}, {"shares": False}, {}):
        with programs_in_order(rng):
            result = plan_and_attend(planner, problem, **options)
        assert_same_bits(result, alone, f"{options} {problem.description}")
        check_device_plan(planner, problem)


def test_ragged_tree():
    problem = tree_problem(
        [
            [("a", 2)],
            [("a", 2), ("b", 1)],
            [("a", 2), ("b", 1), ("c", 5)],
            [("a", 2), ("b", 1), ("c", 5)],
            [("a", 2), ("d", 3), ("e", 1)],
            [("a", 2), ("d", 3)],
            [("f", 1)],
        ]
    )
    planner = make_planner(problem)
    assert_same_bits(plan_and_attend(planner, problem, everything=True), solve(problem))
    assert groups_of(planner, problem) == {
        (frozenset({0, 1, 2, 3, 4, 5}), 0, 32),
        (frozenset({1, 2, 3}), 32, 48),
        (frozenset({2, 3}), 48, 128),
        (frozenset({4, 5}), 32, 80),
    }


def test_more_granules_than_are_hashed_at_once():
    """Groups end before, at and behind the 256 granules of one turn of the loop."""
    lengths = [250, 6, 1, 30]
    names = "abcd"
    paths = [list(zip(names[:depth], lengths[:depth], strict=True)) for depth in (1, 2, 3, 4, 4)]
    problem = tree_problem(paths, heads=(1, 1))
    planner = make_planner(problem)
    update(planner, problem, everything=True)
    assert groups_of(planner, problem) == {
        (frozenset({0, 1, 2, 3, 4}), 0, 4000),
        (frozenset({1, 2, 3, 4}), 4000, 4096),
        (frozenset({2, 3, 4}), 4096, 4112),
        (frozenset({3, 4}), 4112, 4592),
    }
    check_device_plan(planner, problem)
    # the last row has other blocks before the same ones
    problem.block_table[4, 3] = 0
    update(planner, problem, everything=True)
    assert groups_of(planner, problem) == {
        (frozenset({0, 1, 2, 3, 4}), 0, 48),
        (frozenset({0, 1, 2, 3}), 48, 4000),
        (frozenset({1, 2, 3}), 4000, 4096),
        (frozenset({2, 3}), 4096, 4112),
    }


@pytest.mark.parametrize("nulls", [(1, 1, 1), (3, 3, 0), (4, 4, 4), (2, 1, 0)], ids=str)
def test_windows_have_freed_blocks_at_the_head(nulls):
    """Rows with the same blocks and the same number of nulls before them are one group."""
    problem = tree_problem(
        [[("a", 6)]] * 3, tails=[1, 5, 9], heads=(4, 1), features={"sliding_window": 20}
    )
    for request, count in enumerate(nulls):
        problem.block_table[request, :count] = 0
    planner = make_planner(problem)
    result = plan_and_attend(planner, problem, everything=True)
    assert_exact_enough(problem, *result)
    assert_same_bits(result, solve(problem))
    same = {request for request, count in enumerate(nulls) if nulls.count(count) > 1}
    assert groups_of(planner, problem) == ({(frozenset(same), 0, 96)} if same else set())


def test_nothing_but_null_blocks_is_not_shared():
    problem = tree_problem([[]] * 4, tails=[65] * 4)
    problem.block_table[:, :4] = 0
    planner = make_planner(problem)
    update(planner, problem, everything=True)
    assert groups_of(planner, problem) == set()


def test_null_blocks_inside_of_granules_are_not_shared():
    """Granules of two blocks; what follows them may be shared."""
    config = replace(TINY_CUTS, tile_tokens=32)
    problem = tree_problem([[("a", 4)]] * 2, tails=[1, 1])
    table = problem.block_table
    for column, groups in ((0, {(0, 64)}), (1, {(0, 64)}), (2, {(0, 32)}), (3, {(0, 32)})):
        kept = table.clone()
        kept[:, column] = 0
        holed = replace(problem, block_table=kept)
        planner = make_planner(holed, config=config)
        update(planner, holed, everything=True)
        assert {(begin, end) for _, begin, end in groups_of(planner, holed)} == groups


def test_steps_before_lead_nobody():
    """Who held a block first in another step is not who holds it first in this one."""
    problem = tree_problem([[("a", 3)], [("b", 3)], [("b", 3)], [("a", 3)]])
    planner = make_planner(problem)
    for order, groups in (
        ([0, 1, 2, 3], {(frozenset({0, 3}), 0, 48), (frozenset({1, 2}), 0, 48)}),
        ([1, 0, 3, 2], {(frozenset({1, 2}), 0, 48), (frozenset({0, 3}), 0, 48)}),
        ([2, 1, 0, 3], {(frozenset({0, 1}), 0, 48), (frozenset({2, 3}), 0, 48)}),
        ([1, 0, 3], {(frozenset({1, 2}), 0, 48)}),
    ):
        step = problem.select(np.array(order))
        update(planner, step, everything=True)
        assert groups_of(planner, step) == groups


def test_equal_content_under_other_ids_is_not_shared():
    problem = tree_problem([[("a", 3)], [("b", 3)]], tails=[1, 1])
    first, second = problem.block_table[:, :3].long()
    problem.kv_cache[second] = problem.kv_cache[first]
    planner = make_planner(problem)
    assert_same_bits(plan_and_attend(planner, problem, everything=True), solve(problem))
    assert groups_of(planner, problem) == set()


def test_a_block_at_another_column_is_not_shared_whatever_was_there_before():
    """Row 0 had the prefix of row 1 in the step before, and now has its last block elsewhere."""
    before = tree_problem([[("a", 4)]] * 2, tails=[1, 1])
    planner = make_planner(before)
    update(planner, before, everything=True)
    assert groups_of(planner, before) == {(frozenset({0, 1}), 0, 64)}
    now = replace(
        before,
        block_table=before.block_table.clone(),
        seq_lens=torch.tensor([17, 65], dtype=torch.int32),
    )
    now.block_table[0, :2] = torch.tensor([now.block_table[1, 3], now.block_table[0, 4]])
    assert_same_bits(plan_and_attend(planner, now, everything=True), solve(now))
    assert groups_of(planner, now) == set()


def test_padding_is_in_no_group_and_is_not_written():
    """Rows of padding are all null, their tokens belong to nobody."""
    problem = tree_problem([[("a", 3)]] * 5, tails=[1, 1, 1, 7, 7])
    problem.block_table[2:] = 0
    problem.query_start_loc[:] = torch.tensor([0, 1, 2, 2, 2, 2])
    problem.seq_lens[2:] = 0
    planner = make_planner(problem)
    output, lse = plan_and_attend(planner, problem, everything=True)
    real = problem.select(np.arange(2))
    assert_same_bits((output[:2], lse[:2]), solve(real))
    assert output[2:].isnan().all() and lse[2:].isnan().all()
    assert groups_of(planner, problem) == {(frozenset({0, 1}), 0, 48)}
    assert planner.plan.token_request.tolist() == [0, 1, -1, -1, -1]


def test_long_queries_are_left_to_others():
    problem = tree_problem(
        [[("a", 4)]] * 4, tails=[1, 20, 5, 9], query_lens=[1, 17, 4, 5], heads=(4, 2)
    )
    planner = make_planner(problem, max_query_len=4)
    output, lse = plan_and_attend(planner, problem, everything=True)
    whole, whole_lse = solve(problem)
    left_out = torch.zeros(len(output), dtype=torch.bool)
    left_out[1:18] = left_out[22:] = True
    assert output[left_out].isnan().all() and lse[left_out].isnan().all()
    assert_same_bits((output[~left_out], lse[~left_out]), (whole[~left_out], whole_lse[~left_out]))
    assert groups_of(planner, problem) == {(frozenset({0, 2}), 0, 64)}
    check_device_plan(planner, problem)


def test_batch_of_only_long_queries_and_of_nothing():
    problem = tree_problem([[("a", 1)]] * 2, tails=[20, 20], query_lens=[9, 9])
    planner = make_planner(problem, max_query_len=8)
    output, _ = plan_and_attend(planner, problem, everything=True)
    assert output.isnan().all()
    before = planner.plan.counts.clone()
    empty = problem.select(np.arange(0))
    update(planner, empty)
    assert torch.equal(planner.plan.counts, before)


@settings(max_examples=cases(2))
@given(seed=SEEDS)
def test_one_planner_replays_many_steps(seed):
    """The arguments of attention stay the same objects, as in a captured CUDA graph."""
    rng = np.random.default_rng(seed)
    shape: dict[str, Any] = {"heads": (3, 1), "head_size": 32, "block_size": 16}
    steps = [
        small_problem(rng, dtype=torch.bfloat16, use_features=False, max_tokens=250, **shape)
        for _ in range(5)
    ]
    largest = {
        "max_query_len": 64,
        "max_requests": max(step.num_requests for step in steps),
        "max_tokens": max(len(step.query) for step in steps) + 3,
        "max_seq_len": max(step.block_table.shape[1] for step in steps) * 16,
        "num_blocks": max(len(step.kv_cache) for step in steps),
    }
    planner = make_planner(steps[0], rng=rng, **largest)
    width = largest["max_seq_len"] // 16
    tokens = largest["max_tokens"]
    query = torch.full((tokens, 3, 32), torch.nan, dtype=torch.bfloat16)
    cache = torch.zeros((largest["num_blocks"], 1, 16, 64), dtype=torch.bfloat16)
    table = torch.zeros((largest["max_requests"] + 1, width), dtype=torch.int32)
    starts = torch.zeros(largest["max_requests"] + 2, dtype=torch.int32)
    lens = torch.zeros(largest["max_requests"] + 1, dtype=torch.int32)
    out, lse = torch.empty_like(query), torch.empty((tokens, 3))
    one = torch.ones(())

    def attend() -> None:
        planner.attend(query, cache, table, out, lse=lse, scale=scale, k_scale=one, v_scale=one)

    for step in steps:
        scale = step.scale
        requests = step.num_requests
        expected = solve(step)
        cache.fill_(torch.nan)[: len(step.kv_cache)] = cuda_cache(step)
        table.random_(0, largest["num_blocks"])
        table[:requests, : step.block_table.shape[1]] = step.block_table
        query[: len(step.query)] = step.query
        starts[: requests + 1], lens[:requests] = step.query_start_loc, step.seq_lens
        planner.update(
            table[:requests],
            starts[: requests + 1],
            lens[:requests],
            max_query_len=64,
            everything=bool(rng.integers(2)),
            shares=bool(rng.integers(4)),
        )
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        attend()
        num_tokens = len(step.query)
        assert_same_bits((out[:num_tokens], lse[:num_tokens]), expected, step.description)
        assert out[num_tokens:].isnan().all() and lse[num_tokens:].isnan().all()


def test_long_queries_at_the_end_may_exceed_the_buffers():
    """Buffers are for decodes, which come first in a batch."""
    problem = tree_problem([[("a", 3)]] * 3, tails=[1, 7, 60], query_lens=[1, 2, 40])
    planner = make_planner(problem, max_tokens=4, max_query_len=2)
    update(planner, problem, everything=True)
    decodes = problem.select(np.arange(2))
    assert_same_bits(attend_as_planned(planner, decodes), solve(decodes))
    assert groups_of(planner, problem) == {(frozenset({0, 1}), 0, 48)}
    assert planner.plan.token_request.tolist() == [0, 1, 1, -1]


def test_more_requests_than_the_buffers_are_made_for():
    problem = tree_problem([[]] * 3)
    planner = make_planner(problem, max_requests=2)
    with pytest.raises(ValueError, match="3 requests in a step.* made for 2"):
        update(planner, problem)


@pytest.mark.soak
def test_many_random_plans():
    """`RELAY_SOAK_TRITON_CASES` of them, with the seeds from `RELAY_SOAK_FIRST_SEED` on."""
    cases = int(os.environ.get("RELAY_SOAK_TRITON_CASES", "100"))
    first = int(os.environ.get("RELAY_SOAK_FIRST_SEED", "0"))
    for seed in range(first, first + cases):
        rng = np.random.default_rng(seed)
        problem = small_problem(rng, max_requests=10, max_tokens=500)
        description = f"seed {seed}: {problem.description}"
        config = replace(TINY_CUTS, state_cost=float(rng.choice([0.1, 1.0])), start_tokens=8.0)
        planner = make_planner(
            problem, config=config, rng=rng, num_programs=int(rng.integers(1, 40))
        )
        alone = solve(problem)
        for options in ({"everything": True}, {}):
            with programs_in_order(rng):
                result = plan_and_attend(planner, problem, **options)
            assert_same_bits(result, alone, description)
            check_device_plan(planner, problem)
