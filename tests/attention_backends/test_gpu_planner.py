# SPDX-License-Identifier: Apache-2.0
"""Plans in buffers that stay where they are: results are those of every other plan, for steps that
grow, for graphs that are replayed, and where a plan does not fit."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.attention_backends.exactness import assert_same_bits
from tests.attention_backends.strategies import AttentionProblem
from tests.attention_backends.told_blocks import tell
from tests.attention_backends.triton_interpreter import programs_in_order
from tests.attention_backends.triton_problems import (
    TINY_CUTS,
    attend,
    cuda_cache,
    hidden_runs,
    paths_of_levels,
    setup_of,
    small_problem,
    solve,
    tree_problem,
)
from tests.support.depth import cases
from vllm_relay.attention_backends.cuda import step_batch
from vllm_relay.attention_backends.cuda.launch import relay_attention
from vllm_relay.attention_backends.cuda.plans.decode_plans import DecodePlans
from vllm_relay.attention_backends.cuda.plans.planner import PlannerLimits, StepPlanner
from vllm_relay.attention_backends.cuda.step_batch import StepBatch
from vllm_relay.attention_backends.forest import END_TOKENS, Forest
from vllm_relay.attention_backends.groups import find_groups
from vllm_relay.attention_backends.worker_blocks import WorkerBlocks

SEEDS = st.integers(0, 2**32 - 1)


def make_planner(problem: AttentionProblem, *, num_programs: int = 2, **limits: int) -> StepPlanner:
    """For a problem, or for larger ones; its buffer is full of garbage."""
    exactly = {
        "max_requests": max(1, problem.num_requests),
        "max_tokens": max(1, len(problem.query)),
        "max_seq_len": problem.block_table.shape[1] * problem.block_size,
        "max_hidden": max(1, problem.num_requests) if "hidden" in problem.features else 0,
    }
    planner = StepPlanner(
        PlannerLimits(**{**exactly, **limits}),
        setup_of(problem, num_programs=num_programs),
        device="cpu",
    )
    planner.plan.packed.fill_(-(2**30))
    return planner


def update(
    planner: StepPlanner, problem: AttentionProblem, forest: Forest | None = None, spare: int = 0
) -> Forest:
    """Plans a problem whose requests may grow by `spare` tokens."""
    shared, plan = planner.plan_step(
        forest or Forest.none(problem.num_requests),
        problem.query_start_loc.numpy(),
        problem.seq_lens.numpy() + spare,
        least_seq_lens=problem.seq_lens.numpy(),
        window_tokens=problem.features.get("sliding_window") or 0,
    )
    planner.hold(plan)
    planner.begin_step(problem.seq_lens, hidden_runs(problem))
    return shared


def attend_as_planned(
    planner: StepPlanner, problem: AttentionProblem
) -> tuple[torch.Tensor, torch.Tensor]:
    return attend(problem, planner.plan)


@settings(max_examples=cases(3))
@example(seed=1992, spare=39, hides_tokens=False)  # a window of two tokens
@given(seed=SEEDS, spare=st.integers(0, 80), hides_tokens=st.booleans())
def test_attention_is_that_of_requests_alone(seed, spare, hides_tokens):
    """Also where a plan was made for requests that are longer."""
    rng = np.random.default_rng(seed)
    problem = small_problem(rng, hides_tokens=hides_tokens)
    physical = replace(problem, features={}) if hides_tokens else problem
    alone = solve(problem)
    planner = make_planner(problem, num_programs=int(rng.choice([1, 4, 30])))
    for forest in (physical.forest(), None):
        update(planner, problem, forest, spare)
        with programs_in_order(rng):
            result = attend_as_planned(planner, problem)
        assert_same_bits(result, alone, problem.description)


def test_drafts_that_were_refused_are_not_read():
    """The host knows how many tokens there may be."""
    problem = tree_problem([[("a", 6)]] * 3, tails=[20, 33, 7], query_lens=[3, 3, 3])
    planner = make_planner(problem, num_programs=9)
    shared = update(planner, problem, problem.forest())
    assert len(shared.nodes) == 1
    problem.seq_lens[:] -= torch.tensor([2, 1, 3], dtype=torch.int32)
    assert_same_bits(attend_as_planned(planner, problem), solve(problem))


def test_padding_is_not_written():
    problem = tree_problem([[("a", 3)]] * 5, tails=[1, 1, 1, 7, 7])
    real = problem.select(np.arange(2))
    problem.query_start_loc[:] = torch.tensor([0, 1, 2, 2, 2, 2])
    problem.seq_lens[2:] = 0
    planner = make_planner(problem)
    update(planner, problem, Forest(np.arange(5, dtype=np.int32), real.forest().nodes))
    output, lse = attend_as_planned(planner, problem)
    assert_same_bits((output[:2], lse[:2]), solve(real))
    assert output[2:].isnan().all() and lse[2:].isnan().all()


@pytest.mark.parametrize("nulls", [(1, 1, 1), (3, 3, 0), (4, 4, 4), (2, 1, 0)], ids=str)
def test_windows_have_freed_blocks_at_the_head(nulls):
    problem = tree_problem(
        [[("a", 6)]] * 3, tails=[1, 5, 9], heads=(4, 1), features={"sliding_window": 20}
    )
    alone = solve(problem)
    for request, count in enumerate(nulls):
        problem.block_table[request, :count] = 0
    planner = make_planner(problem, num_programs=20)
    assert len(update(planner, problem, problem.forest()).nodes)
    assert_same_bits(attend_as_planned(planner, problem), alone)


@pytest.fixture
def tree() -> AttentionProblem:
    return tree_problem(
        paths_of_levels([1, 2, 4], [16, 3, 1]), tails=[1, 20, 40, 7], query_lens=[1, 2, 1, 3]
    )


def test_what_does_not_fit_is_cut_less_and_then_shared_less(tree):
    alone, forest = solve(tree), tree.forest()
    planner = make_planner(tree, num_programs=40)

    def num_slots(forest: Forest | None, num_programs: int) -> int:
        planner.setup = planner.plan.setup = replace(planner.setup, num_programs=num_programs)
        update(planner, tree, forest)
        assert planner.held is not None
        return planner.held.num_slots

    def update_within(most: int) -> list[int]:
        """Where shared ranges end, with so much room."""
        planner.max_slots = most
        shared = update(planner, tree, forest)
        assert planner.held is not None and planner.held.num_slots <= most
        assert_same_bits(attend_as_planned(planner, tree), alone)
        return shared.nodes[:, END_TOKENS].tolist()

    least_alone = num_slots(None, 1)
    least_of_segments = num_slots(forest.in_multiples(TINY_CUTS.segment_tokens), 1)
    least, finest = num_slots(forest, 1), num_slots(forest, 40)
    assert least_alone <= least_of_segments < least < finest
    assert update_within(finest) == [256, 304, 304]
    assert update_within(finest - 1) == [256, 304, 304]
    assert update_within(least - 1) == [256]


@pytest.fixture
def chain() -> AttentionProblem:
    """24 requests, each of which goes on alone where those behind it still share."""
    return tree_problem([[(str(level), 1) for level in range(2 * size)] for size in range(1, 25)])


def test_a_chain_too_deep_for_all_its_states_is_shared_by_segments(chain):
    planner = make_planner(chain)
    assert len(chain.forest().nodes) == 23
    shared = update(planner, chain, chain.forest())
    assert shared.nodes[:, END_TOKENS].tolist() == [*range(64, 768, 64)]
    assert_same_bits(attend_as_planned(planner, chain), solve(chain))


@pytest.mark.parametrize(("max_slots", "num_weighed"), [(299, 23), (298, 11)])
def test_groups_that_would_take_too_many_states_are_weighed_by_segments(
    chain, monkeypatch, max_slots, num_weighed
):
    """The 24 requests are in 24 + 23 + ... + 2 groups."""
    weighed = []
    monkeypatch.setattr(
        step_batch, "that_pay", lambda forest, *_: weighed.append(len(forest.nodes)) or forest
    )
    blocks, seq_lens = WorkerBlocks(), chain.seq_lens.numpy()
    tell(blocks, chain.block_table.numpy(), seq_lens, chain.block_size)
    planner = make_planner(chain)
    planner.max_slots = max_slots
    plans = DecodePlans(planner, layer_name="layer", min_shared_tokens=0)
    batch = StepBatch(blocks, blocks.request_ids(24), chain.query_start_loc.numpy(), seq_lens)
    shared = plans.plan(batch)
    assert weighed == [num_weighed]
    assert shared.nodes[:, END_TOKENS].tolist() == [*range(64, 768, 64)]


@settings(max_examples=cases(20))
@given(seed=SEEDS)
def test_what_fits_in_slots_fits_in_the_buffer(seed):
    rng = np.random.default_rng(seed)
    problem = small_problem(rng, max_requests=20, max_tokens=600, use_features=False)
    planner = make_planner(problem, num_programs=int(rng.choice([1, 10, 400])))
    planner.max_slots = int(rng.integers(planner.max_slots))
    for forest in (problem.forest(), None):
        _, plan = planner.plan_step(
            forest or Forest.none(problem.num_requests),
            problem.query_start_loc.numpy(),
            problem.seq_lens.numpy(),
        )
        assert len(plan.packed(len(problem.query))) <= planner.most_ints(plan.num_slots)


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
    requests = max(step.num_requests for step in steps)
    tokens = max(len(step.query) for step in steps) + 3
    width = max(step.block_table.shape[1] for step in steps)
    num_blocks = max(len(step.kv_cache) for step in steps)
    planner = make_planner(
        steps[0], max_requests=requests, max_tokens=tokens, max_seq_len=16 * width
    )
    query = torch.full((tokens, 3, 32), torch.nan, dtype=torch.bfloat16)
    cache = torch.zeros((num_blocks, 1, 16, 64), dtype=torch.bfloat16)
    table = torch.zeros((requests + 1, width), dtype=torch.int32)
    lens = torch.zeros(requests + 1, dtype=torch.int32)
    out, lse = torch.empty_like(query), torch.empty((tokens, 3))
    one = torch.ones(())
    planner.begin_step(lens)
    plan = planner.plan
    for step in steps:
        expected = solve(step)
        cache.fill_(torch.nan)[: len(step.kv_cache)] = cuda_cache(step)
        table.random_(0, num_blocks)
        table[: step.num_requests, : step.block_table.shape[1]] = step.block_table
        query[: len(step.query)] = step.query
        lens[: step.num_requests] = step.seq_lens
        _, made = planner.plan_step(
            step.forest() if rng.integers(4) else Forest.none(step.num_requests),
            step.query_start_loc.numpy(),
            step.seq_lens.numpy(),
        )
        planner.hold(made)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        relay_attention(
            query, cache, table, plan, out, lse=lse, scale=step.scale, k_scale=one, v_scale=one
        )
        num_tokens = len(step.query)
        assert_same_bits((out[:num_tokens], lse[:num_tokens]), expected, step.description)
        assert out[num_tokens:].isnan().all() and lse[num_tokens:].isnan().all()


def test_more_than_the_buffers_are_made_for():
    problem = tree_problem([[]] * 3)
    planner = make_planner(problem, max_requests=2)
    with pytest.raises(ValueError, match="3 requests with 3 query tokens .* made for 2 with 3"):
        update(planner, problem)


def test_long_prefixes_pay_and_short_ones_do_not():
    """Two requests, 16 heads each: a state is as large as the keys and values of a token or two."""
    for blocks, pays in ((2, False), (4, False), (16, True), (40, True)):
        problem = tree_problem([[("a", blocks)]] * 2, heads=(16, 1), head_size=128)
        cost = setup_of(problem).cost
        found = find_groups(
            problem.block_table.numpy(), problem.query_lens.numpy(), problem.seq_lens.numpy(),
            block_size=16, group_size=16, cost=cost,
        )  # fmt: skip
        assert bool(len(found.nodes)) == pays


@pytest.mark.soak
def test_many_random_plans():
    """`RELAY_SOAK_TRITON_CASES` of them, with the seeds from `RELAY_SOAK_FIRST_SEED` on."""
    cases = int(os.environ.get("RELAY_SOAK_TRITON_CASES", "100"))
    first = int(os.environ.get("RELAY_SOAK_FIRST_SEED", "0"))
    for seed in range(first, first + cases):
        rng = np.random.default_rng(seed)
        problem = small_problem(rng, max_requests=10, max_tokens=500)
        alone = solve(problem)
        planner = make_planner(problem, num_programs=int(rng.integers(1, 40)))
        for forest in (problem.forest(), None):
            update(planner, problem, forest, int(rng.integers(0, 70)))
            with programs_in_order(rng):
                result = attend_as_planned(planner, problem)
            assert_same_bits(result, alone, f"seed {seed}: {problem.description}")
