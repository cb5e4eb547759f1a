# SPDX-License-Identifier: Apache-2.0
"""Rows whose scores grow out of range against those of their first tokens, by jumps anywhere, in
what is shared and in what is not: references are raised, and nothing else changes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention_backends.exactness import assert_exact_enough, assert_same_bits
from tests.attention_backends.strategies import (
    DTYPES,
    AttentionProblem,
    in_fp8,
    problem_of_table,
)
from tests.attention_backends.test_divided_segments import planned_for
from tests.attention_backends.test_ops import bounds_of
from tests.attention_backends.test_unpacked import solve as solve_unpacked
from tests.support.depth import cases
from vllm_relay.attention_backends import ops, reference
from vllm_relay.attention_backends.cpu import kernels as cpu
from vllm_relay.attention_backends.hidden_tokens import HiddenTokens

SEEDS = st.integers(0, 2**32 - 1)
HEADS, HEAD_SIZE, BLOCK_SIZE = (6, 2), 48, 32
JUMPS_LOG2 = (15, 40, 70, 130, 300, -200)
"""Of scores. Weights overflow float32 against those 128 below them."""
SHARED_TOKENS = (300, 2500)
"""Of all requests, and of every other one of them."""
HIDDEN = tuple((token, token + 9) for token in range(5, 2500, 61))
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 1700},
    "soft cap": {"logits_soft_cap": 300.0},
    "sinks": {"sinks": torch.tensor([0.0, 50.0, -50.0, 500.0, 3.0, -1.0])},
    "ALiBi": {"alibi_slopes": torch.tensor([2.0, 1.0, 0.3, 0.1, 0.05, 0.01])},
    "hidden": {"hidden": HiddenTokens(dict.fromkeys(range(12), HIDDEN))},
}
every_feature = pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def kernels_of(problem: AttentionProblem) -> Iterator[tuple[str, str]]:
    """All that can solve it, and what to say of each: to make a problem takes far longer than to
    solve it."""
    for kernel in cpu.usable_kernels(problem.query.dtype):
        yield kernel, f"{kernel}, {problem.description}"


def growing_problem(
    rng: np.random.Generator,
    dtype: torch.dtype,
    features: dict[str, Any],
    *,
    values: str = "any",
    jump: tuple[int, float] | None = None,
) -> AttentionProblem:
    """Twelve requests of two or three segments, most with one query token.

    Args:
        values: "any"; "early": some dims have values near the beginning of segments only, so that
            outputs tell what becomes of weights far below the largest; "large": 2^100 in a dim.
        jump: the block in every row where scores grow, and by how much in units of log2; any number
            of blocks unless given.
    """
    seq_lens = rng.integers(2600, 4400, 12)
    query_lens = np.array([1] * 10 + [2, 5])
    width = -(-int(seq_lens.max()) // BLOCK_SIZE)
    table = np.arange(12 * width).reshape(12, width)
    for tokens, step in zip(SHARED_TOKENS, (1, 2), strict=True):
        table[::step, : tokens // BLOCK_SIZE] = table[0, : tokens // BLOCK_SIZE]
    numbers = np.unique(table, return_inverse=True)[1]
    table = (1 + numbers).reshape(table.shape).astype(np.int32)
    problem = problem_of_table(
        rng, table, seq_lens, query_lens,
        num_blocks=int(table.max()) + 1, dtype=dtype, data="random", features=features,
        heads=HEADS, head_size=HEAD_SIZE, block_size=BLOCK_SIZE,
    )  # fmt: skip
    direction = torch.from_numpy(rng.choice([-1.0, 1.0], HEAD_SIZE)).float()
    rises = torch.from_numpy(rng.choice([0.2, 1.0, 1.7, -1.0], problem.query.shape[:2])).float()
    levels, positions = levels_of(rng, table, jump)
    unit = math.log(2) / math.sqrt(HEAD_SIZE)  # a key of a score of one, in units of log2
    key, value = (each.float() for each in reference.unpack_kv_cache(problem.kv_cache))
    key = 0.3 * key + torch.from_numpy(levels * unit).float()[:, None, :, None] * direction
    if values == "early":
        value[..., ::3] *= torch.from_numpy(positions % 2048 < 350)[:, None, :, None]
    if values == "large":
        value[..., 1] = 2.0**100
    return replace(
        problem,
        query=(0.3 * problem.query.float() + rises[..., None] * direction).to(dtype),
        kv_cache=reference.pack_kv_cache(key.to(dtype), value.to(dtype)),
    )


def levels_of(
    rng: np.random.Generator, table: np.ndarray, jump: tuple[int, float] | None
) -> tuple[np.ndarray, np.ndarray]:
    """What the scores of slots rise to, in units of log2, and the positions of slots; both
    [blocks, block_size]."""
    levels = np.zeros((table.max() + 1, BLOCK_SIZE))
    positions = np.zeros(levels.shape, np.int64)
    known = np.zeros(len(levels), bool)
    for row in table:
        level = 0.0
        for place, block in enumerate(row):
            if not known[block]:
                jumps = np.zeros(BLOCK_SIZE)
                if jump is not None:
                    jumps[7] = jump[1] * (place == jump[0])
                elif rng.random() < 0.06:
                    jumps[rng.integers(BLOCK_SIZE)] = rng.choice(JUMPS_LOG2)
                levels[block] = level + jumps.cumsum()
                positions[block] = place * BLOCK_SIZE + np.arange(BLOCK_SIZE)
                known[block] = True
            level = levels[block, -1]
    return levels, positions


@every_feature
@every_dtype
@settings(max_examples=cases(2))
@given(seed=SEEDS)
def test_close_to_float64(dtype, features, seed):
    problem = growing_problem(np.random.default_rng(seed), dtype, features)
    for kernel, description in kernels_of(problem):
        result = problem.solve(ops.relay_attention, kernel=kernel)
        assert_exact_enough(problem, result, bounds_of(problem, kernel), description)


@every_feature
@every_dtype
@settings(max_examples=cases(2))
@given(seed=SEEDS, values=st.sampled_from(["any", "early", "large"]))
def test_who_shares_and_who_computes_changes_no_bit(dtype, features, seed, values):
    rng = np.random.default_rng(seed)
    values = "early" if values == "large" and dtype == torch.float16 else values
    problem = growing_problem(rng, dtype, features, values=values)
    everything = problem.forest()
    some = everything.without(rng.random(len(everything.nodes)) < 0.5)
    order = rng.permutation(problem.num_requests)
    parts = [
        (problem.select(requests), problem.token_indices(requests))
        for requests in (order[:7], order[7:])
    ]
    for kernel, description in kernels_of(problem):
        torch.set_num_threads(1)
        alone = problem.solve(ops.relay_attention, kernel=kernel, forest=None)
        assert alone[0].isfinite().all(), description
        for num_threads, forest in [(1, "auto"), (1, everything), (2, some), (3, everything)]:
            torch.set_num_threads(num_threads)
            result = problem.solve(ops.relay_attention, kernel=kernel, forest=forest)
            assert_same_bits(result, alone, f"{num_threads} threads, {description}")
        for num_threads, forest in [(24, None), (300, everything)]:
            with planned_for(num_threads) as plans:
                result = problem.solve(ops.relay_attention, kernel=kernel, forest=forest)
            assert_same_bits(result, alone, f"{num_threads} threads, {description}")
        assert len(plans[0].work.divisions) or "hidden" in features
        for part, tokens in parts:
            result = part.solve(ops.relay_attention, kernel=kernel, forest=part.forest())
            assert_same_bits(result, (alone[0][tokens], alone[1][tokens]), description)


@every_dtype
@pytest.mark.parametrize("jump_log2", [45, 65, 115, 140])
@pytest.mark.parametrize("values", ["any", "early"])
@pytest.mark.parametrize("block", [6, 12])
def test_one_jump(dtype, jump_log2, block, values):
    """In what all share, also if sums are finite all the same and what follows would bring them
    back into range; and behind that, where those who share read tokens in other chunks."""
    jump = (block, jump_log2)
    problem = growing_problem(np.random.default_rng(0), dtype, {}, values=values, jump=jump)
    for kernel, description in kernels_of(problem):
        alone = problem.solve(ops.relay_attention, kernel=kernel, forest=None)
        if values == "any":
            assert_exact_enough(problem, alone, bounds_of(problem, kernel), description)
        grouped = problem.solve(ops.relay_attention, kernel=kernel, forest=problem.forest())
        assert_same_bits(grouped, alone, description)


@every_dtype
@pytest.mark.parametrize("tokens", [200, 2088])
def test_what_a_later_jump_leaves_little_weight_is_kept(dtype, tokens):
    """Scores rise by 100 and then by 30: only tokens between them have values. The second rise is
    in the same segment, or where the next one begins."""
    width = -(-tokens // BLOCK_SIZE)
    table = 1 + np.arange(width).reshape(1, width).astype(np.int32)
    problem = problem_of_table(
        np.random.default_rng(0), table, np.array([tokens]), np.array([1]),
        num_blocks=width + 1, dtype=dtype, data="random", features={},
        heads=HEADS, head_size=HEAD_SIZE, block_size=BLOCK_SIZE,
    )  # fmt: skip
    position = torch.arange((width + 1) * BLOCK_SIZE) - BLOCK_SIZE  # block 0 is the null block
    level = 100.0 * (position >= 64) + 30.0 * (position >= tokens - 40)
    is_between = (position >= 64) & (position < tokens - 40)
    key, value = (each.float() for each in reference.unpack_kv_cache(problem.kv_cache))
    unit = math.log(2) / math.sqrt(HEAD_SIZE)
    of_slots = (width + 1, 1, BLOCK_SIZE, 1)
    key = (level * unit).view(of_slots).expand_as(key)
    value = value * is_between.view(of_slots)
    problem = replace(
        problem,
        query=torch.ones_like(problem.query),
        kv_cache=reference.pack_kv_cache(key.to(dtype).contiguous(), value.to(dtype)),
    )
    for kernel, description in kernels_of(problem):
        result = problem.solve(ops.relay_attention, kernel=kernel)
        assert_exact_enough(problem, result, bounds_of(problem, kernel), description)


@every_dtype
@settings(max_examples=cases(2))
@given(seed=SEEDS)
def test_fp8_and_tokens_in_no_cache(dtype, seed):
    rng = np.random.default_rng(seed)
    narrow, wide = in_fp8(growing_problem(rng, dtype, {}, values="early"))
    for kernel, description in kernels_of(wide):
        expected = wide.solve(ops.relay_attention, kernel=kernel, forest=None)
        for forest in (None, narrow.forest()):
            result = narrow.solve(ops.relay_attention, kernel=kernel, forest=forest)
            assert_same_bits(result, expected, f"fp8, {description}")
        assert_same_bits(solve_unpacked(wide, kernel), expected, description)


@every_dtype
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_undefined_scores_stay_with_their_request(dtype, bad):
    problem = growing_problem(np.random.default_rng(0), dtype, {})
    key, value = reference.unpack_kv_cache(problem.kv_cache)
    key[problem.block_table[3, 75], :, 17] = bad  # of one request, beside scores in range
    undefined = replace(problem, kv_cache=reference.pack_kv_cache(key, value))
    for kernel, description in kernels_of(problem):
        alone = problem.solve(ops.relay_attention, kernel=kernel, forest=None)
        output, lse = undefined.solve(ops.relay_attention, kernel=kernel, forest=undefined.forest())
        assert output[3].isnan().all(), description
        others = torch.arange(len(output)) != 3
        expected = alone[0][others], alone[1][others]
        assert_same_bits((output[others], lse[others]), expected, description)
