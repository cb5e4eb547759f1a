# SPDX-License-Identifier: Apache-2.0
"""What kernels that keep a weight as two bf16 numbers have to do with the lower one, on any
machine."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.attention_backends.exactness import assert_exact_enough, assert_same_bits
from tests.attention_backends.strategies import AttentionProblem, error_bounds, random_problem
from tests.attention_backends.test_divided_segments import planned_for
from vllm_relay.attention_backends import ops

MOST = 2.0**-7
"""Of a row's largest partial sum: a tile of weights up to this has no lower numbers."""


def uneven_problem(rng: np.random.Generator) -> AttentionProblem:
    """Rows of one tile need the lower numbers of other tokens: blocks of keys and rows of queries
    are of several sizes."""
    hides_tokens = bool(rng.integers(2))
    problem = random_problem(rng, dtype=torch.bfloat16, data="random", hides_tokens=hides_tokens)
    num_blocks, num_kv_heads, block_size, width = problem.kv_cache.shape
    cache = problem.kv_cache.reshape(num_blocks, num_kv_heads, 2, -1).clone()
    cache[:, :, 0] *= torch.from_numpy(rng.choice([0.1, 1, 6], (num_blocks, num_kv_heads, 1)))
    sizes = torch.from_numpy(rng.choice([0.1, 1, 4], (*problem.query.shape[:2], 1)))
    return replace(
        problem,
        query=(problem.query * sizes).to(torch.bfloat16),
        kv_cache=cache.view(num_blocks, num_kv_heads, block_size, width),
    )


def check_grouping(kernel: str, seed: int) -> None:
    problem = uneven_problem(np.random.default_rng(seed))
    alone = problem.solve(ops.relay_attention, kernel=kernel, forest=None)
    assert_exact_enough(problem, alone, error_bounds(problem))
    grouped = problem.solve(ops.relay_attention, kernel=kernel, forest=problem.forest())
    assert_same_bits(grouped, alone, problem.description)


SINKS = [(0, 1), (0, 2), (17, 1)]
"""Where the first token is that a row sees, and how many there are that weigh 1."""


def check_which_are_dropped(kernel: str, sinks: tuple[int, int], num_threads: int) -> None:
    """One token weighs w and another what w is rounded to, with the opposite value: the output
    is w's lower number. Tokens that weigh 1 are the largest partial sum."""
    most = MOST * sinks[1]
    kept = lower_number(kernel, sinks, num_threads, most * (1 + 5.4 * 2.0**-7))
    assert kept == pytest.approx(1, rel=0.02)
    assert lower_number(kernel, sinks, num_threads, most * (1 - 1.3 * 2.0**-8)) == 0


def lower_number(kernel: str, sinks: tuple[int, int], num_threads: int, weight: float) -> float:
    """The lower number of `weight` that the output tells, over what it should be."""
    first, num_sinks = sinks
    rounded = float(torch.tensor(weight).bfloat16())
    scores = torch.full((100,), -300.0)
    scores[first : first + 16 * num_sinks : 16] = 0  # all in the same partial sum
    scores[40], scores[75] = math.log2(weight), math.log2(rounded)
    value = torch.zeros(100, 1, 32)
    value[40], value[75] = 1, -1
    key = torch.zeros(100, 1, 32)
    for dim in range(3):  # a score of 24 bits is the sum of three bf16 numbers
        key[:, 0, dim] = (scores - key[:, 0].sum(1)).bfloat16()
    cache = torch.zeros(2, 1, 128, 64, dtype=torch.bfloat16)
    ops.write_kv_cache(key.bfloat16(), value.bfloat16(), cache, torch.arange(128, 228))
    with planned_for(num_threads) as plans:
        output, _ = ops.relay_attention(
            torch.ones(1, 1, 32, dtype=torch.bfloat16),
            cache,
            torch.ones(1, 1, dtype=torch.int32),
            torch.tensor([0, 1], dtype=torch.int32),
            torch.tensor([100], dtype=torch.int32),
            scale=math.log(2),
            num_kv_heads=1,
            sliding_window=100 - first,
            kernel=kernel,
        )
    assert len(plans[0].work.divisions) == (num_threads > 1)
    assert (output == output[0, 0, 0]).all()
    return float(output[0, 0, 0]) * (num_sinks + weight + rounded) / (weight - rounded)
