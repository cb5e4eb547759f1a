# SPDX-License-Identifier: Apache-2.0
"""The Triton attention kernels against float64, and shared work against work done alone."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention_backends.exactness import assert_same_bits
from tests.attention_backends.strategies import DATA_KINDS, DTYPES
from tests.attention_backends.triton_interpreter import programs_in_order
from tests.attention_backends.triton_problems import (
    OTHER_CUTS,
    assert_exact_enough,
    cuda_cache,
    every_feature,
    paths_of_levels,
    small_problem,
    solve,
    strided,
    tree_problem,
)
from tests.support.depth import cases
from vllm_relay.attention_backends.forest import Forest

SEEDS = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=cases(3))
@given(seed=SEEDS)
def test_random_forests(dtype, seed):
    """Close to float64, and to the bit the same for any grouping, cut and number of programs."""
    rng = np.random.default_rng(seed)
    problem = small_problem(rng, dtype=dtype)
    alone = solve(problem)
    assert_exact_enough(problem, *alone)
    everything = problem.forest()
    some = everything.without(rng.random(len(everything.nodes)) < 0.5)
    with programs_in_order(rng):
        for forest, num_programs in ((everything, 40), (everything, 7), (some, 1)):
            shared = solve(problem, forest, num_programs=num_programs)
            assert_same_bits(shared, alone, problem.description)


@settings(max_examples=cases(2))
@given(seed=SEEDS)
def test_parts_of_a_batch_in_any_order(seed):
    rng = np.random.default_rng(seed)
    problem = small_problem(rng)
    output, lse = solve(problem, problem.forest())
    order = rng.permutation(problem.num_requests)
    cut = int(rng.integers(problem.num_requests + 1))
    for requests in (order[:cut], order[cut:]):
        part = problem.select(requests)
        tokens = problem.token_indices(requests)
        result = solve(part, part.forest(), num_programs=int(rng.choice([1, 30])))
        assert_same_bits(result, (output[tokens], lse[tokens]), problem.description)


@pytest.mark.parametrize(
    ("heads", "head_size", "block_size", "dtype"),
    [
        ((3, 1), 64, 16, torch.bfloat16),
        ((5, 1), 80, 32, torch.float16),
        ((14, 2), 96, 48, torch.float32),
        ((71, 1), 64, 64, torch.bfloat16),
        ((4, 4), 128, 128, torch.float16),
        ((8, 2), 160, 16, torch.bfloat16),
        ((2, 1), 256, 32, torch.float32),
        ((16, 1), 48, 64, torch.float16),
    ],
    ids=str,
)
@pytest.mark.parametrize("tokens_first", [False, True], ids=["heads first", "tokens first"])
def test_shapes_and_strides(heads, head_size, block_size, dtype, tokens_first):
    levels = paths_of_levels([1, 2, 3], [1, 1, 1] if block_size > 48 else [2, 1, 1])
    problem = tree_problem(
        levels,
        tails=[5, 1, 9],
        query_lens=[1, 2, 3],
        heads=heads,
        head_size=head_size,
        block_size=block_size,
        dtype=dtype,
    )
    out = strided(torch.full_like(problem.query, torch.nan), padding=7.0)
    whole = out._base
    around = torch.ones_like(whole, dtype=torch.bool)
    around[tuple(slice(size) for size in out.shape)] = False
    cache = cuda_cache(problem, tokens_first=tokens_first)
    padded = replace(problem, query=strided(problem.query))
    result = solve(padded, problem.forest(), kv_cache=cache, out=out)
    assert_exact_enough(problem, *result)
    assert (whole[around] == 7.0).all()


@pytest.mark.parametrize(
    ("dtype", "features"),
    [
        *((torch.float16, {name: feature}) for name, feature in every_feature(4).items()),
        (torch.float16, every_feature(4)),
        (torch.float32, every_feature(4)),
        (torch.float32, {"sliding_window": 1}),
        (
            torch.bfloat16,
            {"sliding_window": 97, "sinks": torch.tensor([-torch.inf, -50.0, 0.0, 50.0])},
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else str(value),
)
def test_features(dtype, features):
    """Windows end before the shared ranges for some rows, and inside of them for others."""
    problem = tree_problem(
        [[("a", 5)], [("a", 5), ("b", 2)], [("a", 5), ("b", 2)]],
        tails=[1, 70, 7],
        query_lens=[1, 20, 3],
        heads=(4, 2),
        dtype=dtype,
        features=features,
    )
    alone = solve(problem, num_programs=1)
    assert_exact_enough(problem, *alone)
    assert_same_bits(solve(problem, problem.forest()), alone)


@pytest.mark.parametrize("data", DATA_KINDS)
def test_kinds_of_data(data):
    for dtype in DTYPES:
        problem = tree_problem(
            paths_of_levels([1, 2, 4], [3, 2, 1]), tails=[1, 17, 33, 2], dtype=dtype, data=data
        )
        shared = solve(problem, problem.forest(), num_programs=1)
        assert_exact_enough(problem, *shared)
        assert_same_bits(solve(problem), shared, problem.description)


@pytest.mark.parametrize(
    ("paths", "tails"),
    [
        # Hydragen: ragged tails of one prefix, and of two levels
        ([[("a", 4)]] * 2, [7, 7]),
        ([[("a", 4)]] * 4, [9, 10, 11, 4]),
        ([[("a", 2)]] * 8, [129, 2, 3, 4, 5, 6, 7, 128]),
        ([[("a", 16)]] * 3, [1, 32, 64]),
        # PAT: complete trees, several roots, ragged depths
        (paths_of_levels([1, 2, 4, 8], [2, 1, 2, 1]), None),
        (paths_of_levels([2, 2, 4], [3, 4, 1]), None),
        (
            [[("0", 1), ("1", 2), ("5", 1)], [("0", 1), ("2", 1)], [("3", 1), ("4", 3)]],
            [16, 33, 1],
        ),
        # FlashInfer: unique parts of 17 and 37 tokens
        (paths_of_levels([1, 5], [4, 2]), [17, 37, 17, 37, 17]),
        # groups inside of groups of the same requests, and requests that share all they have
        ([[("a", 1), ("b", 1)], [("a", 1), ("b", 1), ("c", 9)], [("a", 1)]], [1, 1, 1]),
    ],
)
def test_trees_of_others(paths, tails):
    problem = tree_problem(paths, tails=tails, heads=(4, 1))
    shared = solve(problem, problem.forest(), num_programs=1)
    assert_exact_enough(problem, *shared)
    assert_same_bits(solve(problem), shared)


@pytest.mark.parametrize("boundary", [16, 32, 64, 128, 256], ids="at {}".format)
def test_ranges_end_at_every_kind_of_boundary_and_beside_it(boundary):
    """Tiles are of 16 tokens, blocks of 32, segments of 64, sections of 128."""
    blocks = -(-(boundary + 2) // 32)
    tree = tree_problem(
        [[("same", blocks)]] * 3, tails=[1, 1, 1], query_lens=[1, 3, 2], block_size=32
    )
    for end in (boundary - 1, boundary, boundary + 1):
        seq_lens = torch.tensor([end, end + 2, end + 3], dtype=torch.int32)
        problem = replace(tree, seq_lens=seq_lens)
        alone = solve(problem)
        assert_exact_enough(problem, *alone)
        for node_end in {min(end, node_end) for node_end in (boundary - 1, boundary, end)}:
            nodes = np.array([[0, 3, 0, node_end, 1]], np.int32)
            forest = Forest(np.arange(3, dtype=np.int32), nodes)
            assert_same_bits(solve(problem, forest, num_programs=1), alone)


@pytest.mark.parametrize("query_lens", [[1], [1, 0], [0, 0]], ids=str)
def test_groups_of_one_and_batches_of_nothing(query_lens):
    problem = tree_problem(
        [[("a", 3)]] * len(query_lens), tails=[5] * len(query_lens), query_lens=query_lens
    )
    order = np.arange(len(query_lens), dtype=np.int32)
    group_of_one = Forest(order, np.array([[0, 1, 0, 48, 0]], np.int32))
    assert_exact_enough(problem, *solve(problem))
    assert_same_bits(solve(problem, group_of_one), solve(problem))


def test_no_requests():
    problem = tree_problem([])
    output, lse = solve(problem)
    assert output.shape == (0, 2, 32) and lse.shape == (0, 2)


def test_one_token_is_its_value():
    problem = tree_problem([[]], tails=[1], dtype=torch.bfloat16)
    output, lse = solve(problem)
    assert_exact_enough(problem, output, lse)
    value = cuda_cache(problem)[problem.block_table[0, 0], 0, 0, 32:]
    assert torch.equal(output[0], value.expand(2, 32))


def test_lse_may_be_left_out():
    problem = tree_problem([[("a", 3)], [("a", 3)], []], tails=[5, 1, 9])
    expected, _ = solve(problem, problem.forest())
    output, _ = solve(problem, problem.forest(), lse=None)
    assert torch.equal(output, expected)


def test_other_cuts_are_as_exact():
    problem = tree_problem(paths_of_levels([1, 2, 4], [5, 2, 1]), tails=[1, 70, 3, 40])
    shared = solve(problem, problem.forest(), config=OTHER_CUTS, num_programs=1)
    assert_exact_enough(problem, *shared)
    assert_same_bits(solve(problem, config=OTHER_CUTS), shared)


def test_more_rows_than_a_tile_has():
    """47 rows of the group take two tiles of 32 rows."""
    problem = tree_problem([[("a", 3)]] * 4, query_lens=[2, 3, 1, 1], tails=[3] * 4, heads=(7, 1))
    shared = solve(problem, problem.forest(), num_programs=1)
    assert_exact_enough(problem, *shared)
    assert_same_bits(solve(problem, num_programs=20), shared)


@pytest.mark.soak
def test_many_random_forests():
    """`RELAY_SOAK_TRITON_CASES` of them, with the seeds from `RELAY_SOAK_FIRST_SEED` on."""
    cases = int(os.environ.get("RELAY_SOAK_TRITON_CASES", "100"))
    first = int(os.environ.get("RELAY_SOAK_FIRST_SEED", "0"))
    for seed in range(first, first + cases):
        rng = np.random.default_rng(seed)
        sizes = {"max_tokens": 600, "max_requests": 10} if rng.integers(4) == 0 else {}
        problem = small_problem(rng, **sizes)
        alone = solve(problem)
        assert_exact_enough(problem, *alone)
        everything = problem.forest()
        some = everything.without(rng.random(len(everything.nodes)) < 0.5)
        for forest in (everything, some):
            num_programs = int(rng.choice([1, 3, 10, 60]))
            with programs_in_order(rng):
                shared = solve(problem, forest, num_programs=num_programs)
            assert_same_bits(shared, alone, f"seed {seed}: {problem.description}")
