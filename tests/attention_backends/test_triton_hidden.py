# SPDX-License-Identifier: Apache-2.0
"""Triton attention that does not see some tokens; those that nobody sees hold NaN."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention_backends.exactness import assert_same_bits
from tests.attention_backends.strategies import DTYPES, AttentionProblem
from tests.attention_backends.test_gpu_planner import attend_as_planned, make_planner, update
from tests.attention_backends.triton_interpreter import programs_in_order
from tests.attention_backends.triton_problems import (
    OTHER_CUTS,
    assert_exact_enough,
    hidden_runs,
    small_problem,
    solve,
    tree_problem,
)
from tests.support.depth import cases
from vllm_relay.attention_backends.cuda.hidden_bits import SEES_ALL, HiddenBits, bits_of
from vllm_relay.attention_backends.forest import Forest
from vllm_relay.attention_backends.hidden_tokens import HiddenTokens

SEEDS = st.integers(0, 2**32 - 1)


def physical_forest(problem: AttentionProblem) -> Forest:
    """Of all who have the same blocks, whatever they hide of them."""
    features = {name: each for name, each in problem.features.items() if name != "hidden"}
    return replace(problem, features=features).forest()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=cases(2))
@given(seed=SEEDS)
def test_random_forests(dtype: torch.dtype, seed: int) -> None:
    """Close to float64, and to the bit the same however it is grouped, also with those who hide
    other tokens of the same blocks."""
    rng = np.random.default_rng(seed)
    problem = small_problem(rng, dtype=dtype, hides_tokens=True)
    alone = solve(problem)
    assert_exact_enough(problem, *alone)
    everything = physical_forest(problem)
    some = everything.without(rng.random(len(everything.nodes)) < 0.5)
    with programs_in_order(rng):
        for forest, num_programs in ((everything, 40), (everything, 7), (some, 1)):
            shared = solve(problem, forest, num_programs=num_programs)
            assert_same_bits(shared, alone, problem.description)


@settings(max_examples=cases(2))
@given(seed=SEEDS)
def test_other_cuts(seed: int) -> None:
    problem = small_problem(np.random.default_rng(seed), hides_tokens=True)
    result = solve(problem, physical_forest(problem), config=OTHER_CUTS, num_programs=1)
    assert_exact_enough(problem, *result)
    assert_same_bits(solve(problem, config=OTHER_CUTS), result, problem.description)


# tiles are of 16 tokens, blocks of 32, segments of 64, sections of 128
PLACES = [
    ((0, 16),),
    ((0, 64),),
    ((63, 65),),
    ((64, 128), (129, 130)),
    ((0, 128),),
    ((127, 129), (191, 256)),
    ((0, 1), (2, 3), (31, 33), (255, 256)),
    ((0, 256),),
]


@pytest.mark.parametrize("ranges", PLACES, ids=str)
def test_whole_tiles_and_the_edges_of_every_cut(ranges: tuple[tuple[int, int], ...]) -> None:
    hidden = HiddenTokens({0: ranges, 1: ranges, 3: ranges})
    problem = tree_problem(
        [[("a", 8)]] * 4,
        tails=[1, 2, 20, 3],
        query_lens=[1, 2, 17, 1],
        block_size=32,
        features={"hidden": hidden},
    )
    alone = solve(problem)
    assert_exact_enough(problem, *alone)
    for num_programs in (1, 30):
        shared = solve(problem, physical_forest(problem), num_programs=num_programs)
        assert_same_bits(shared, alone)


def test_query_tokens_of_a_request_hide_different_tokens() -> None:
    """Each as if it were a request of its own."""
    runs = {0: ((3, 20),), 1: ((3, 20), (40, 64)), 2: (), 3: ((0, 96),), 4: ((50, 51),)}
    lens = [2, 1, 4, 1, 3]
    together = tree_problem([[("a", 7)]], tails=[11], query_lens=[11], heads=(6, 2), seed=4)
    ends = np.cumsum(lens).tolist()
    starts = [end - length for end, length in zip(ends, lens, strict=True)]
    found = solve(
        together, runs=[(starts[run], ends[run], ranges) for run, ranges in runs.items() if ranges]
    )
    before = int(together.seq_lens[0]) - sum(lens)
    apart = replace(
        together,
        block_table=together.block_table.expand(5, -1).contiguous(),
        query_start_loc=torch.tensor([0, *ends], dtype=torch.int32),
        seq_lens=torch.tensor([before + end for end in ends], dtype=torch.int32),
        features={"hidden": HiddenTokens({run: each for run, each in runs.items() if each})},
    )
    assert_exact_enough(apart, *found)
    assert_same_bits(solve(apart), found)


def test_one_planner_for_many_steps() -> None:
    """Rows of bits stay where they are, and make room for others."""
    problem = tree_problem([[("a", 6)]] * 3, features={"hidden": HiddenTokens({0: ((0, 1),)})})
    planner = make_planner(problem, max_hidden=2)
    assert planner.hidden is not None
    first, second, third = (((0, 17),), ((20, 40), (41, 60)), ((95, 96),))
    for ranges in (
        {0: first},
        {1: first, 2: second},
        {0: second, 1: second},
        {},
        {2: third, 1: second},
        {0: first, 2: first},
    ):
        step = replace(problem, features={"hidden": HiddenTokens(ranges)})
        update(planner, step, physical_forest(step))
        assert_same_bits(attend_as_planned(planner, step), solve(step))
        named = planner.hidden.row_of_token[:3].tolist()
        assert [row == SEES_ALL for row in named] == [each not in ranges for each in range(3)]
    with pytest.raises(ValueError, match="3 sets of hidden tokens in a step, room for 2"):
        planner.hidden.update([(0, 1, first), (1, 2, second), (2, 3, third)])
    unprepared = make_planner(problem, max_hidden=0)
    with pytest.raises(ValueError, match="made for none"):
        update(unprepared, problem)


def test_rows_are_uploaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_relay.attention_backends.cuda import hidden_bits as gpu_hidden

    uploads = []
    upload = gpu_hidden.upload

    def counted(array: np.ndarray, device: torch.device) -> torch.Tensor:
        uploads.append(array.nbytes)
        return upload(array, device)

    monkeypatch.setattr(gpu_hidden, "upload", counted)
    hidden = HiddenBits(4, 8, 100, torch.device("cpu"))
    ranges = ((1, 2),)
    hidden.update([])
    assert uploads == []
    hidden.update([(0, 1, ranges)])
    assert uploads == [2 * 8, 8, 8 * 4]  # two words, their row, and which row tokens have
    hidden.update([(0, 1, ranges)])
    assert len(uploads) == 3
    hidden.update([(2, 3, ranges)])
    assert uploads[3:] == [8 * 4]
    hidden.update([])
    assert uploads[4:] == [8 * 4]


@given(seed=SEEDS)
def test_bits(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_tokens = int(rng.integers(1, 200))
    edges = np.unique(rng.integers(0, num_tokens + 1, 2 * int(rng.integers(0, 5))))
    edges = edges[: len(edges) // 2 * 2].reshape(-1, 2).tolist()
    bits = bits_of([(), tuple((begin, end) for begin, end in edges)], num_tokens)
    assert bits.dtype == np.int64 and bits.shape == (2, -(-num_tokens // 64))
    assert not bits[0].any()
    for token in range(num_tokens):
        is_hidden = any(begin <= token < end for begin, end in edges)
        assert (int(bits[1, token // 64]) >> token % 64 & 1) == is_hidden


def test_runs_of_a_problem() -> None:
    hidden = HiddenTokens({1: ((0, 2),)})
    problem = tree_problem([[("a", 1)]] * 2, query_lens=[1, 1], features={"hidden": hidden})
    assert hidden_runs(problem) == [(1, 2, ((0, 2),))]
