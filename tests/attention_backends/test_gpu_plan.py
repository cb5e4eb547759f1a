# SPDX-License-Identifier: Apache-2.0
"""The work list: everything is read exactly once, and merged in the order that cuts prescribe."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention_backends.plan_checks import check_plan
from tests.attention_backends.strategies import random_problem
from tests.attention_backends.triton_problems import TINY_CUTS, fitting, plan_of, tree_problem
from tests.support.depth import cases
from vllm_relay.attention_backends.cuda.config import KernelConfig
from vllm_relay.attention_backends.cuda.plan import (
    MAX_DEPTH,
    MODE_DIRECT,
    MODE_STATE,
    MODE_TILE_STATES,
    GpuPlan,
    pieces,
    plan_forest,
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
    )


@st.composite
def ranges(draw):
    config = draw(configs())
    begin = config.tile_tokens * draw(st.integers(0, 40))
    length = draw(st.integers(0, 6 * config.section_tokens + 5))
    if draw(st.booleans()):
        length = length // config.tile_tokens * config.tile_tokens
    return config, begin, begin + length, draw(st.booleans())


@settings(max_examples=cases(125))
@given(ranges())
def test_pieces_cut_where_segments_and_sections_end(case):
    config, begin, end, folds = case
    cut = list(pieces(begin, end, config, folds))
    assert [piece[0] for piece in cut] == [begin, *(piece[1] for piece in cut)][: len(cut)]
    assert (cut[-1][1] if cut else begin) == end
    for piece_begin, piece_end, mode, slots in cut:
        assert piece_begin < piece_end
        length, segment, section = (
            piece_end - piece_begin,
            config.segment_tokens,
            config.section_tokens,
        )
        first_segment, last_segment = piece_begin // segment, (piece_end - 1) // segment
        assert piece_begin // section == (piece_end - 1) // section
        if mode == MODE_TILE_STATES:
            assert piece_begin % segment and first_segment == last_segment
            assert slots == -(-length // config.tile_tokens)
        else:
            assert mode == MODE_STATE and piece_begin % segment == 0 and slots == 1
        if first_segment != last_segment:
            assert folds and piece_begin % section == 0 and length % segment == 0
    if folds:  # as few as there can be
        whole = [piece for piece in cut if piece[0] % config.section_tokens == 0]
        for piece_begin, piece_end, *_ in whole:
            segments_end = end // config.segment_tokens * config.segment_tokens
            expected = min(piece_begin + config.section_tokens, segments_end)
            assert piece_end == (expected if expected > piece_begin else end)


@settings(max_examples=cases(38))
@given(seed=SEEDS, config=configs(), folds=st.booleans())
def test_everything_is_read_once(seed, config, folds):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, max_tokens=2000, block_size=int(rng.choice([16, 32, 48, 128])))
    config = fitting(config, problem)
    everything = problem.forest()
    some = everything.without(rng.random(len(everything.nodes)) < 0.5)
    for forest in (None, everything, some):
        check_plan(plan_of(problem, forest, config=config, folds=folds), problem, config)


def test_numbers_of_a_small_plan():
    """Three requests share 80 tokens, two of them 32 more; four query heads per kv head."""
    problem = tree_problem(
        [[("a", 5)], [("a", 5), ("b", 2)], [("a", 5), ("b", 2)], []],
        tails=[1, 7, 60, 20],
        query_lens=[1, 1, 3, 1],
        heads=(4, 1),
    )
    plan = plan_of(problem, problem.forest(), folds=True)
    assert plan.members[:6].tolist() == [0, 1, 2, 3, 4, 5]
    assert sorted(plan.members[6:11].tolist()) == [0, 1, 2, 3, 4]
    assert sorted(plan.members[11:].tolist()) == [1, 2, 3, 4]
    assert plan.chain_length.tolist() == [2, 3, 3, 1]
    # 80 tokens: the segment up to 64, and what is left; 32 tokens from 80 on: two tiles
    assert plan.ranges[:2].tolist() == [[0, 80, 0, 2, 1], [80, 112, 10, 2, 1]]
    assert plan.token_request.tolist() == [0, 1, 2, 2, 2, -1]
    assert len(plan.large_items) == 2  # 20 rows in a tile of 32, for each of two pieces
    assert (plan.small_items[:, 3] <= 16).all()
    # then 1 token, 7 tokens, and 60 tokens for each of 3: four tiles to the right of 112, of which
    # the first is left of the segment that begins at 128
    assert plan.ranges[2:5, :4].tolist() == [[80, 81, 18, 1], [112, 119, 19, 1], [112, 172, 20, 2]]
    assert plan.small_items[-1].tolist() == [3, 5, 0, 4, 0, 20, 26, 1, MODE_DIRECT]
    assert plan.num_slots == 27


def test_ends_of_shared_ranges_are_rounded_down_to_tiles():
    problem = tree_problem([[("a", 2)]] * 2, tails=[30, 30], block_size=48)
    order = np.arange(2, dtype=np.int32)
    plan = plan_of(problem, Forest(order, np.array([[0, 2, 0, 95, 1]], np.int32)))
    assert plan.ranges[0, :2].tolist() == [0, 80]
    plan = plan_of(problem, Forest(order, np.array([[0, 2, 0, 15, 1]], np.int32)))
    assert plan.chain_length.tolist() == [1, 1] and len(plan.ranges) == 2


def test_only_short_private_ranges_are_direct():
    lengths = [1, 64, 65, 128, 200]
    problem = tree_problem([[]] * len(lengths), tails=lengths)
    for folds in (False, True):
        plan = plan_of(problem, folds=folds)
        assert plan.token_request.tolist() == [-1, -1, 2, 3, 4]
        assert (plan.small_items[:, 8] == MODE_DIRECT).sum() == 2


@pytest.mark.parametrize(("window", "begin"), [(1, 192), (8, 192), (9, 128), (500, 0)])
def test_private_ranges_begin_with_the_segment_that_the_window_sees(window, begin):
    problem = tree_problem([[]], tails=[200], features={"sliding_window": window})
    assert plan_of(problem).ranges[0, :2].tolist() == [begin, 200]


def test_as_deep_as_chains_are_and_deeper():
    def plan_of_depth(depth: int) -> GpuPlan:
        nodes = [[0, 2, 16 * level, 16 * level + 16, 0] for level in range(depth)]
        return plan_forest(
            Forest(np.arange(2, dtype=np.int32), np.array(nodes, np.int32)),
            np.array([0, 1, 2]),
            np.array([16 * depth + 1] * 2),
            config=TINY_CUTS,
            group_size=1,
            folds=False,
        )

    assert plan_of_depth(MAX_DEPTH).chain_length.tolist() == [MAX_DEPTH + 1] * 2
    with pytest.raises(ValueError, match=f"more than {MAX_DEPTH} shared ranges"):
        plan_of_depth(MAX_DEPTH + 1)


def test_empty_batch():
    plan = plan_of(tree_problem([]), folds=True)
    assert plan.num_slots == 0
    assert plan.large_items.shape == plan.small_items.shape == (0, 9)
    assert plan.ranges.shape == (0, 5)
