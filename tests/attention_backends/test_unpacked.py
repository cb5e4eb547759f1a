# SPDX-License-Identifier: Apache-2.0
"""Attention over tokens in no KV cache: within the bounds of float64, and to the last bit what the
kernels compute over a KV cache with the same tokens. What no request reads is NaN."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention_backends.exactness import Result, assert_exact_enough, assert_same_bits
from tests.attention_backends.strategies import (
    DATA_KINDS,
    DTYPES,
    ROUNDING_KERNELS,
    AttentionProblem,
    error_bounds,
    problem_of_table,
    random_problem,
)
from tests.support.depth import cases
from vllm_relay.attention_backends import ops, reference
from vllm_relay.attention_backends.cpu import kernels as cpu
from vllm_relay.attention_backends.cpu.unpacked import TokenRun, UnpackedRequest, unpacked_attention
from vllm_relay.attention_backends.cpu.unpacked_plan import plan_unpacked

SEEDS = st.integers(0, 2**32 - 1)
every_kernel = pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        pytest.param(kernel, dtype, id=f"{kernel}-{str(dtype).removeprefix('torch.')}")
        for dtype in DTYPES
        for kernel in cpu.usable_kernels(dtype)
    ],
)


def runs_of(problem: AttentionProblem, kv: Result, request: int, end: int) -> list[TokenRun]:
    """Those of its blocks, which requests share.

    Args:
        kv: keys and values [blocks, kv_heads, block_size, head_size].
    """
    keys, values = kv
    size = problem.block_size
    blocks = problem.block_table[request, : -(-end // size)].tolist()
    return [
        TokenRun(i * size, min((i + 1) * size, end), keys[block].unbind(), values[block].unbind())
        for i, block in enumerate(blocks)
    ]


def solve(problem: AttentionProblem, kernel: str = "auto", *, float_output: bool = False) -> Result:
    kv, requests = reference.unpack_kv_cache(problem.kv_cache), []
    for request in range(problem.num_requests):
        first, last = problem.query_start_loc[request : request + 2].tolist()
        end = int(problem.seq_lens[request])
        runs = runs_of(problem, kv, request, end)
        requests.append(UnpackedRequest(first, last - first, 0, end, runs, is_causal=True))
    dtype = torch.float32 if float_output else problem.query.dtype
    output = torch.full(problem.query.shape, torch.nan, dtype=dtype)
    lse = torch.full(problem.query.shape[:2], torch.nan)
    unpacked_attention(
        problem.query, requests, output, lse,
        scale=problem.scale, num_kv_heads=problem.num_kv_heads, kernel=kernel,
    )  # fmt: skip
    return output, lse


@every_kernel
@settings(max_examples=cases(12))
@given(seed=SEEDS)
def test_close_to_float64_and_what_a_kv_cache_gives(
    kernel: str, dtype: torch.dtype, seed: int
) -> None:
    problem = random_problem(np.random.default_rng(seed), dtype=dtype, use_features=False)
    found = solve(problem, kernel)
    bounds = error_bounds(problem, sums_rounded_weights=kernel in ROUNDING_KERNELS)
    assert_exact_enough(problem, found, bounds)
    expected = problem.solve(ops.relay_attention, kernel=kernel, forest=None)
    assert_same_bits(found, expected, problem.description)
    floats, lse = solve(problem, kernel, float_output=True)
    assert_same_bits((floats.to(dtype), lse), expected, problem.description)


@pytest.mark.parametrize("data", DATA_KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kinds_of_data(data: str, dtype: torch.dtype) -> None:
    for seed in range(4):
        rng = np.random.default_rng(seed)
        problem = random_problem(rng, dtype=dtype, data=data, use_features=False)
        found, expected = solve(problem), problem.solve(ops.relay_attention, forest=None)
        assert_same_bits(found, expected, problem.description)


def long_problem(
    dtype: torch.dtype, query_lens: list[int], heads: tuple[int, int] = (6, 2)
) -> AttentionProblem:
    """Requests of several segments that share the tokens before their last 300."""
    rng = np.random.default_rng(0)
    block_size, seq_lens = 64, np.array([5000 + 37 * i for i in range(len(query_lens))])
    width = -(-int(seq_lens.max()) // block_size)
    shared = (int(seq_lens.min()) - 300) // block_size
    own = width - shared
    table = np.zeros((len(query_lens), width), np.int32)
    table[:, :shared] = 1 + np.arange(shared)
    table[:, shared:] = 1 + shared + np.arange(len(query_lens) * own).reshape(-1, own)
    return problem_of_table(
        rng, table, seq_lens, np.array(query_lens),
        num_blocks=int(table.max()) + 1, dtype=dtype, data="random", features={}, heads=heads,
        head_size=32, block_size=block_size,
    )  # fmt: skip


@every_kernel
@pytest.mark.parametrize("query_lens", [[1], [1, 1, 1], [130, 1, 70]], ids=str)
def test_any_number_of_threads_over_several_segments(
    kernel: str, dtype: torch.dtype, query_lens: list[int]
) -> None:
    check_threads(long_problem(dtype, query_lens), kernel)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_rows_are_divided_themselves(dtype: torch.dtype) -> None:
    query_lens, heads = [270], (8, 1)
    plan = plan_unpacked(
        query_lens, [0], [5000], group_size=heads[0], num_kv_heads=heads[1], num_threads=2
    )
    assert len(set(plan.items[:, 0])) > 1
    check_threads(long_problem(dtype, query_lens, heads), "auto")


def check_threads(problem: AttentionProblem, kernel: str) -> None:
    expected = problem.solve(ops.relay_attention, kernel=kernel, forest=None)
    for num_threads in (1, 2, 7):
        torch.set_num_threads(num_threads)
        assert_same_bits(solve(problem, kernel), expected, f"{num_threads} threads")


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (7, 1), (14, 2), (5, 5)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_head_ratios(heads: tuple[int, int], dtype: torch.dtype) -> None:
    problem = long_problem(dtype, [40, 1, 3], heads)
    assert_same_bits(solve(problem), problem.solve(ops.relay_attention, forest=None))


def states(num_tokens: int, num_kv_heads: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Keys and values [2, kv_heads, tokens + 8, 64]; NaN behind the tokens."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.full((2, num_kv_heads, num_tokens + 8, 64), torch.nan)
    made[:, :, :num_tokens] = torch.randn(made[:, :, :num_tokens].shape, generator=generator)
    return made.to(dtype)


@every_kernel
@pytest.mark.parametrize(
    ("begin", "end"), [(0, 1), (1, 2), (33, 700), (64, 2048), (2040, 2060), (2100, 4100)]
)
def test_all_queries_see_all_that_is_read(
    kernel: str, dtype: torch.dtype, begin: int, end: int
) -> None:
    """Whatever it begins and ends with; the rest of the memory is NaN."""
    keys, values = states(end, 2, dtype, seed=end)
    keys[:, :begin] = values[:, :begin] = torch.nan
    query = torch.randn(5, 6, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    cut = (begin + end) // 2
    runs = [
        TokenRun(first, last, keys[:, first:].unbind(), values[:, first:].unbind())
        for first, last in ((begin, cut), (cut, end))
        if first < last
    ]
    output = torch.full(query.shape, torch.nan)
    lse = torch.full(query.shape[:2], torch.nan)
    requests = [
        UnpackedRequest(0, 3, begin, end, runs, is_causal=False),
        UnpackedRequest(4, 1, begin, end, runs, is_causal=False),
    ]
    unpacked_attention(query, requests, output, lse, scale=0.2, num_kv_heads=2, kernel=kernel)
    seen = [each[:, begin:end].double().repeat_interleave(3, 0) for each in (keys, values)]
    scores = 0.2 * torch.einsum("thd,hkd->thk", query.double(), seen[0])
    expected = torch.einsum("thk,hkd->thd", scores.softmax(-1), seen[1])
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-5, torch.bfloat16: 2e-2}[dtype]
    rows = [0, 1, 2, 4]
    torch.testing.assert_close(output[rows].double(), expected[rows], atol=tolerance, rtol=0)
    torch.testing.assert_close(
        lse[rows].double(), scores.logsumexp(-1)[rows], atol=tolerance, rtol=0
    )
    assert output[3].isnan().all() and lse[3].isnan().all()  # of no request


@pytest.mark.parametrize("end", [0, 32])
def test_a_request_that_reads_nothing(end: int) -> None:
    query = torch.randn(3, 4, 64)
    output, lse = torch.full(query.shape, torch.nan), torch.full(query.shape[:2], torch.nan)
    run = TokenRun(0, 50, *(each.unbind() for each in states(50, 2, torch.float32, seed=0)))
    requests = [
        UnpackedRequest(0, 1, 32, end, [], is_causal=False),
        UnpackedRequest(1, 1, 0, 50, [run], is_causal=False),
        UnpackedRequest(2, 0, 0, 50, [run], is_causal=False),
    ]
    unpacked_attention(query, requests, output, lse, scale=0.1, num_kv_heads=2)
    assert (output[0] == 0).all() and (lse[0] == -math.inf).all()
    assert output[1].isfinite().all() and lse[1].isfinite().all()
    assert output[2].isnan().all()
    unpacked_attention(query, requests[:1], output, lse, scale=0.1, num_kv_heads=2)
    unpacked_attention(query, [], output, lse, scale=0.1, num_kv_heads=2)
    assert (output[0] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_request_does_not_see_what_the_one_before_it_left(
    number: float, dtype: torch.dtype
) -> None:
    """Nor what its own memory held before."""
    query = torch.randn(70, 4, 64, generator=torch.Generator().manual_seed(9)).to(dtype)

    def attend(kv: torch.Tensor, end: int) -> torch.Tensor:
        output = torch.full_like(query, math.nan)
        run = TokenRun(0, end, kv[0].unbind(), kv[1].unbind())
        request = UnpackedRequest(0, 70, 0, end, [run], is_causal=True)
        unpacked_attention(query, [request], output, None, scale=0.125, num_kv_heads=2)
        return output

    healthy = states(290, 2, dtype, seed=1)
    expected = attend(healthy, 290)
    assert expected.isfinite().all()
    kept = healthy.clone()
    healthy[:] = number
    assert not attend(healthy, 290).isfinite().any()
    healthy[:] = kept
    assert torch.equal(attend(healthy, 290), expected)
