# SPDX-License-Identifier: Apache-2.0
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention_backends import exactness
from tests.attention_backends.exactness import assert_same_bits
from tests.attention_backends.strategies import (
    DATA_KINDS,
    DTYPES,
    ROUNDING_KERNELS,
    AttentionProblem,
    error_bounds,
    random_problem,
)
from tests.support.depth import cases
from vllm_relay import _C, limits
from vllm_relay.attention_backends import ops, reference
from vllm_relay.attention_backends.cost import KERNEL_COSTS
from vllm_relay.attention_backends.cpu import kernels as cpu

INF = float("inf")
SEEDS = st.integers(0, 2**32 - 1)
KERNELS_OF_DTYPES = [
    pytest.param(kernel, dtype, id=f"{kernel}-{str(dtype).removeprefix('torch.')}")
    for dtype in DTYPES
    for kernel in cpu.usable_kernels(dtype)
]
every_kernel = pytest.mark.parametrize(("kernel", "dtype"), KERNELS_OF_DTYPES)


def problem_of(seed: int, **keywords) -> AttentionProblem:
    return random_problem(np.random.default_rng(seed), **keywords)


def bounds_of(problem, kernel):
    kernel = cpu.kernel_for(problem.query.dtype, kernel)
    return error_bounds(problem, sums_rounded_weights=kernel in ROUNDING_KERNELS)


def assert_exact_enough(problem, output, lse, kernel="auto"):
    exactness.assert_exact_enough(problem, (output, lse), bounds_of(problem, kernel))


@every_kernel
@settings(max_examples=cases(7))
@given(seed=SEEDS)
def test_close_to_float64(kernel, dtype, seed):
    problem = problem_of(seed, dtype=dtype)
    assert_exact_enough(problem, *problem.solve(ops.relay_attention, kernel=kernel), kernel)


@every_kernel
@settings(max_examples=cases(8))
@given(seed=SEEDS)
def test_grouped_is_alone_to_the_bit(kernel, dtype, seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, dtype=dtype)
    alone = problem.solve(ops.relay_attention, kernel=kernel, forest=None)
    everything = problem.forest()
    some = everything.without(rng.random(len(everything.nodes)) < 0.5)
    for forest in ("auto", everything, some):
        grouped = problem.solve(ops.relay_attention, kernel=kernel, forest=forest)
        assert_same_bits(grouped, alone, problem.description)


@every_kernel
@settings(max_examples=cases(3))
@given(seed=SEEDS)
def test_each_request_alone_and_in_any_order(kernel, dtype, seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, dtype=dtype)
    output, lse = problem.solve(ops.relay_attention, kernel=kernel, forest=problem.forest())
    order = rng.permutation(problem.num_requests)
    for requests in [order, order[: len(order) // 2], *order[:, None]]:
        part = problem.select(requests)
        tokens = problem.token_indices(requests)
        result = part.solve(ops.relay_attention, kernel=kernel, forest=part.forest())
        assert_same_bits(result, (output[tokens], lse[tokens]), problem.description)


@every_kernel
@settings(max_examples=cases(5))
@given(seed=SEEDS)
def test_any_number_of_threads(kernel, dtype, seed):
    problem = problem_of(seed, dtype=dtype)
    results = []
    for num_threads in (3, 2, 1):
        torch.set_num_threads(num_threads)
        results.append(problem.solve(ops.relay_attention, kernel=kernel, forest=problem.forest()))
    assert_same_bits(results[1], results[0], problem.description)
    assert_same_bits(results[2], results[0], problem.description)


@pytest.mark.parametrize("data", DATA_KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kinds_of_data_with_everything_shared(data, dtype):
    for seed in range(4):
        problem = problem_of(seed, dtype=dtype, data=data)
        result = problem.solve(ops.relay_attention, forest=problem.forest())
        assert_exact_enough(problem, *result)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_shared_prefix(dtype):
    """More tokens and requests than any tile or work item holds, with a tree below the prefix."""
    rng = np.random.default_rng(0)
    block_size, head_size, num_heads, num_kv_heads = 32, 64, 6, 2
    num_requests, prefix_blocks, branch_blocks = 40, 64, 5
    table = np.arange(1, 1 + num_requests * 80).reshape(num_requests, 80).astype(np.int32)
    table[:, :prefix_blocks] = table[0, :prefix_blocks]
    branch = slice(prefix_blocks, prefix_blocks + branch_blocks)
    table[:, branch] = table[np.arange(num_requests) // 8 * 8, branch]
    seq_lens = rng.integers((prefix_blocks + branch_blocks) * block_size + 1, 80 * 32, num_requests)
    key, value = (
        torch.from_numpy(
            rng.standard_normal((table.max() + 1, num_kv_heads, block_size, head_size), np.float32)
        ).to(dtype)
        for _ in range(2)
    )
    query = rng.standard_normal((num_requests, num_heads, head_size), np.float32)
    problem = AttentionProblem(
        query=torch.from_numpy(query).to(dtype),
        kv_cache=reference.pack_kv_cache(key, value),
        block_table=torch.from_numpy(table),
        query_start_loc=torch.arange(num_requests + 1, dtype=torch.int32),
        seq_lens=torch.from_numpy(seq_lens.astype(np.int32)),
        scale=head_size**-0.5,
        num_kv_heads=num_kv_heads,
        features={},
        description="long prefix",
    )
    forest = problem.forest()
    assert forest.depth == 2 and len(forest.nodes) == 6
    result = problem.solve(ops.relay_attention, forest=forest)
    assert_exact_enough(problem, *result)
    assert_same_bits(problem.solve(ops.relay_attention), result, "auto")
    assert_same_bits(problem.solve(ops.relay_attention, forest=None), result, "none")


@every_kernel
@pytest.mark.parametrize("window", [None, 3000])
def test_long_sequences_split_over_threads(kernel, dtype, window):
    """Several segments per request, one kv head: threads share a request and merge its parts."""
    rng = np.random.default_rng(1)
    block_size, head_size, num_heads = 64, 48, 3
    seq_lens, query_lens = np.array([5000, 17000, 4200, 90]), np.array([1, 1, 5, 3])
    table = np.arange(1, 1 + 4 * 270).reshape(4, 270).astype(np.int32)
    table[1, :60] = table[0, :60]
    shape = (table.max() + 1, 1, block_size, head_size)
    key = rng.standard_normal(shape, np.float32)
    key[table[1, 70:140]] *= 30  # a segment that outgrows its first reference
    query = rng.standard_normal((query_lens.sum(), num_heads, head_size), np.float32)
    problem = AttentionProblem(
        query=torch.from_numpy(query).to(dtype),
        kv_cache=reference.pack_kv_cache(
            torch.from_numpy(key).to(dtype),
            torch.from_numpy(rng.standard_normal(shape, np.float32)).to(dtype),
        ),
        block_table=torch.from_numpy(table),
        query_start_loc=torch.from_numpy(np.append(0, np.cumsum(query_lens)).astype(np.int32)),
        seq_lens=torch.from_numpy(seq_lens.astype(np.int32)),
        scale=head_size**-0.5,
        num_kv_heads=1,
        features={"sliding_window": window} if window else {},
        description="long sequences",
    )
    torch.set_num_threads(1)
    expected = problem.solve(ops.relay_attention, kernel=kernel)
    assert_exact_enough(problem, *expected, kernel)
    for num_threads in (2, 5):
        torch.set_num_threads(num_threads)
        for forest in ("auto", None):
            result = problem.solve(ops.relay_attention, kernel=kernel, forest=forest)
            assert_same_bits(result, expected, f"{num_threads} threads, forest {forest}")


@every_kernel
@settings(max_examples=cases(4))
@given(seed=SEEDS)
def test_states_of_two_halves_merge_to_the_whole(kernel, dtype, seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, dtype=dtype, use_features=False)
    # one query token per request, so that a half is causal attention too
    decodes = problem.select(np.flatnonzero(problem.query_lens == 1))
    cut_blocks = torch.from_numpy(
        rng.integers(0, (decodes.seq_lens // problem.block_size).numpy() + 1)
    ).int()
    cut_tokens = cut_blocks * problem.block_size
    has_first, has_second = cut_tokens > 0, cut_tokens < decodes.seq_lens
    tokens, num_heads, _ = decodes.query.shape
    states = []
    for present, seq_lens, start_blocks in (
        (has_first, cut_tokens, torch.zeros_like(cut_blocks)),
        (has_second, decodes.seq_lens - cut_tokens, cut_blocks),
    ):
        output = torch.zeros_like(decodes.query)
        lse = torch.full((tokens, num_heads), -INF)
        columns = start_blocks[:, None] + torch.arange(decodes.block_table.shape[1])
        columns = columns.clamp(max=decodes.block_table.shape[1] - 1).long()
        output[present], lse[present] = ops.relay_attention(
            decodes.query[present],
            decodes.kv_cache,
            decodes.block_table.gather(1, columns)[present],
            torch.arange(int(present.sum()) + 1, dtype=torch.int32),
            seq_lens[present],
            scale=decodes.scale,
            num_kv_heads=decodes.num_kv_heads,
            kernel=kernel,
        )
        states += [output, lse]
    merged, merged_lse = ops.merge_states(*states)
    expected, expected_lse = decodes.expected
    output_bound, lse_bound = bounds_of(decodes, kernel)
    # each half was rounded to the dtype once, and the merged output once more
    assert ((merged.double() - expected).abs() <= 2 * output_bound).all(), decodes.description
    assert ((merged_lse.double() - expected_lse).abs() <= 2 * lse_bound).all(), decodes.description


@settings(max_examples=cases(25))
@given(seed=SEEDS)
def test_merge_states_equals_reference(seed):
    rng = np.random.default_rng(seed)
    dtype = DTYPES[rng.integers(3)]
    outputs = torch.from_numpy(rng.standard_normal((2, 9, 3, 32), np.float32)).to(dtype)
    lse = torch.from_numpy(rng.standard_normal((2, 9, 3), np.float32) * 10)
    for infinity in (-INF, INF):
        lse[torch.from_numpy(rng.random(lse.shape) < 0.2)] = infinity
    merged, merged_lse = ops.merge_states(outputs[0], lse[0], outputs[1], lse[1])
    expected, expected_lse = reference.merge_states(outputs[0], lse[0], outputs[1], lse[1])
    assert merged.dtype == dtype
    torch.testing.assert_close(merged, expected)
    torch.testing.assert_close(merged_lse, expected_lse)
    neutral = torch.isinf(lse[0])[..., None] & ~torch.isinf(lse[1])[..., None]
    assert torch.equal(merged.where(neutral, 0), outputs[1].where(neutral, 0))


def test_merge_states_of_extreme_lse():
    output = torch.ones(1, 1, 32)
    for lse_a, lse_b in [(3e38, -3e38), (3e38, 3e38), (-3e38, -3e38), (1e4, 1e4 + 1)]:
        merged, lse = ops.merge_states(
            output, torch.tensor([[lse_a]]), output, torch.tensor([[lse_b]])
        )
        assert torch.allclose(merged, output) and lse.isfinite().all()


@every_kernel
def test_empty_batch_and_one_token(kernel, dtype):
    kv_cache = torch.full((2, 1, 32, 64), torch.nan).to(dtype)
    keywords = {"scale": 1.0, "num_kv_heads": 1, "kernel": kernel}
    output, lse = ops.relay_attention(
        torch.empty(0, 3, 32, dtype=dtype),
        kv_cache,
        torch.empty(0, 4, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
        torch.empty(0, dtype=torch.int32),
        **keywords,
    )
    assert output.shape == (0, 3, 32) and lse.shape == (0, 3)

    value = torch.linspace(-2, 2, 32).to(dtype)
    ops.write_kv_cache(
        torch.ones(1, 1, 32, dtype=dtype), value.view(1, 1, 32), kv_cache, torch.tensor([32])
    )
    output, lse = ops.relay_attention(
        torch.ones(1, 3, 32, dtype=dtype),
        kv_cache,
        torch.ones(1, 1, dtype=torch.int32),
        torch.tensor([0, 1], dtype=torch.int32),
        torch.ones(1, dtype=torch.int32),
        **keywords,
    )
    torch.testing.assert_close(output[0], value.expand(3, 32), rtol=2.0**-23, atol=0.0)
    lse_tolerance = 2.0**-8 if kernel in ROUNDING_KERNELS else 2.0**-18
    torch.testing.assert_close(lse[0], torch.full((3,), 32.0), rtol=0.0, atol=lse_tolerance)


@every_kernel
def test_out_is_written_and_returned(kernel, dtype):
    problem = problem_of(11, dtype=dtype)
    expected, _ = problem.solve(ops.relay_attention, kernel=kernel)
    out = torch.full_like(problem.query, torch.nan)
    output, _ = problem.solve(ops.relay_attention, kernel=kernel, out=out)
    assert output is out and torch.equal(out, expected)


def test_query_may_be_a_slice_of_fused_projections():
    problem = problem_of(12, dtype=torch.bfloat16)
    tokens, num_heads, head_size = problem.query.shape
    fused = torch.full((tokens, num_heads + 4, head_size), torch.nan, dtype=torch.bfloat16)
    fused[:, 2:-2] = problem.query
    positional, keywords = problem.arguments()
    result = ops.relay_attention(fused[:, 2:-2], *positional[1:], **keywords)
    assert_same_bits(result, problem.solve(ops.relay_attention), problem.description)


def valid_arguments() -> dict:
    return {
        "query": torch.zeros(3, 4, 32),
        "kv_cache": torch.zeros(5, 2, 32, 64),
        "block_table": torch.ones(2, 2, dtype=torch.int32),
        "query_start_loc": torch.tensor([0, 1, 3], dtype=torch.int32),
        "seq_lens": torch.tensor([5, 40], dtype=torch.int32),
        "scale": 1.0,
        "num_kv_heads": 2,
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("query", torch.zeros(3, 4 * 32)),
        ("query", torch.zeros(3, 4, 48)),
        ("query", torch.zeros(3, 3, 32)),
        ("query", torch.zeros(3, 4, 32, dtype=torch.float16)),
        ("query", torch.zeros(3, 32, 4).transpose(1, 2)),
        ("kv_cache", torch.zeros(5, 3, 32, 64)),
        ("kv_cache", torch.zeros(5, 2, 16, 64)),
        ("kv_cache", torch.zeros(5, 2, 32, 40)),
        ("kv_cache", torch.zeros(5, 2, 32, 64, dtype=torch.float64)),
        ("kv_cache", torch.zeros(5, 2, 64, 32).transpose(2, 3)),
        ("block_table", torch.ones(2, 2, dtype=torch.int64)),
        ("block_table", torch.ones(3, 2, dtype=torch.int32)),
        ("block_table", torch.ones(2, dtype=torch.int32)),
        ("block_table", torch.ones(2, 1, dtype=torch.int32)),
        ("block_table", torch.full((2, 2), 5, dtype=torch.int32)),
        ("block_table", torch.full((2, 2), -1, dtype=torch.int32)),
        ("query_start_loc", torch.tensor([0, 3], dtype=torch.int32)),
        ("query_start_loc", torch.tensor([0, 1, 4], dtype=torch.int32)),
        ("query_start_loc", torch.tensor([0, 3, 1], dtype=torch.int32)),
        ("query_start_loc", torch.tensor([0.0, 1.0, 3.0])),
        ("seq_lens", torch.tensor([[5, 40]], dtype=torch.int32)),
        ("seq_lens", torch.tensor([5, 1], dtype=torch.int32)),
        ("seq_lens", torch.tensor([5.0, 40.0])),
        ("forest", "sometimes"),
        ("sliding_window", -1),
        ("alibi_slopes", torch.zeros(3)),
        ("logits_soft_cap", -30.0),
        ("sinks", torch.zeros(2, 4)),
        ("out", torch.zeros(3, 4, 64)),
        ("out", torch.zeros(3, 4, 32, dtype=torch.bfloat16)),
    ],
)
def test_errors_name_the_argument(name, value):
    with pytest.raises(ValueError, match=f"^{name}"):
        ops.relay_attention(**{**valid_arguments(), name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("key", torch.zeros(3, 64)),
        ("key", torch.zeros(3, 2, 48)),
        ("key", torch.zeros(3, 2, 32, dtype=torch.float16)),
        ("value", torch.zeros(3, 3, 32)),
        ("value", torch.zeros(3, 2, 32, dtype=torch.bfloat16)),
        ("kv_cache", torch.zeros(5, 2, 30, 64)),
        ("slot_mapping", torch.tensor([1, 2, 3], dtype=torch.int32)),
        ("slot_mapping", torch.tensor([1, 2, 3, 4])),
        ("slot_mapping", torch.tensor([1, 2, 5 * 32])),
    ],
)
def test_write_errors_name_the_argument(name, value):
    arguments = {
        "key": torch.zeros(3, 2, 32),
        "value": torch.zeros(3, 2, 32),
        "kv_cache": torch.zeros(5, 2, 32, 64),
        "slot_mapping": torch.tensor([40, -1, 41]),
    }
    ops.write_kv_cache(**arguments)
    with pytest.raises(ValueError, match=f"^{name}"):
        ops.write_kv_cache(**{**arguments, name: value})


@pytest.mark.parametrize("name", ["output_a", "output_b", "lse_a", "lse_b"])
def test_merge_errors_name_the_argument(name):
    arguments = {
        "output_a": torch.zeros(3, 2, 32),
        "lse_a": torch.zeros(3, 2),
        "output_b": torch.zeros(3, 2, 32),
        "lse_b": torch.zeros(3, 2),
    }
    ops.merge_states(**arguments)
    with pytest.raises(ValueError, match="^(output|lse)_[ab]: expected shape"):
        ops.merge_states(**{**arguments, name: torch.zeros(4, 2, 2, 2)})


@settings(max_examples=cases(25))
@given(seed=SEEDS)
def test_write_equals_reference_bit_for_bit(seed):
    rng = np.random.default_rng(seed)
    dtype = DTYPES[rng.integers(3)]
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    num_blocks, num_kv_heads = int(rng.integers(1, 5)), int(rng.integers(1, 4))
    block_size, head_size = 32 * int(rng.integers(1, 5)), 16 * int(rng.integers(2, 17))
    tokens = int(rng.integers(0, num_blocks * block_size + 1))

    def random_bits(*shape):  # NaN payloads, infinities and subnormals among them
        info = torch.iinfo(bits)
        return torch.from_numpy(rng.integers(info.min, info.max, shape)).to(bits).view(dtype)

    fused = random_bits(tokens, 3 * num_kv_heads, head_size)
    key, value = fused[:, :num_kv_heads], fused[:, -num_kv_heads:]
    slots = torch.from_numpy(rng.permutation(num_blocks * block_size)[:tokens])
    slots[torch.from_numpy(rng.random(tokens) < 0.2)] = -1
    written = random_bits(num_blocks, num_kv_heads, block_size, 2 * head_size)
    expected = written.clone()
    torch.set_num_threads(int(rng.integers(1, 4)))  # neighbours are written by several threads
    ops.write_kv_cache(key, value, written, slots)
    reference.write_kv_cache(key, value, expected, slots)
    assert torch.equal(written.view(bits), expected.view(bits))


def test_kernels_and_what_is_known_of_them_agree():
    compiled = [name for name in _C.compiled_kernels() if "emulated" not in name]
    assert compiled == [name for name in limits.KERNELS if name in compiled]
    assert set(limits.KERNELS) <= set(KERNEL_COSTS)


def test_float32_comes_first_where_bf16_products_are_slow():
    slow = _C.cpu_features()["avx512_bf16_is_slow"]
    info = Path("/proc/cpuinfo").read_text()
    assert slow == ("GenuineIntel" in info and {"avx512_bf16", "avx512_fp16"} <= set(info.split()))
    order = [name for name in _C.supported_kernels() if name in ("avx512", "avx512_bf16")]
    assert order == sorted(order, reverse=not slow)


def test_kernels_serve_their_dtypes():
    for kernel in _C.supported_kernels():
        assert cpu.kernel_for(torch.bfloat16, kernel) == kernel
    for dtype in (torch.float32, torch.float16):
        assert (
            cpu.kernel_for(dtype) == cpu.usable_kernels(dtype)[0] in ("avx512", "avx2", "portable")
        )
    with pytest.raises(ValueError, match="'gpu'"):
        cpu.kernel_for(torch.float32, "gpu")
    with pytest.raises(ValueError, match="int8"):
        cpu.kernel_for(torch.int8)


@pytest.mark.parametrize("kernel", cpu.usable_kernels(torch.float32))
@pytest.mark.parametrize("grouped", [True, False])
def test_no_weight_is_subnormal(kernel: str, grouped: bool) -> None:
    """x86 would take far longer for each, and heads that look at one token have few others."""
    block_size, head_size, requests = 32, 32, 3
    key, value = torch.zeros(2, 2 * block_size, 1, head_size)
    key[1:, 0, 0] = -135 * math.log(2)  # of the first token the score is 0
    value[1:] = 2.0**110
    kv_cache = torch.zeros(3, 1, block_size, 2 * head_size)
    ops.write_kv_cache(
        key, value, kv_cache, torch.arange(block_size, 3 * block_size), kernel=kernel
    )
    query = torch.zeros(requests, 1, head_size)
    query[:, 0, 0] = 1.0
    out, _ = ops.relay_attention(
        query, kv_cache, torch.tensor([[1, 2]] * requests, dtype=torch.int32),
        torch.arange(requests + 1, dtype=torch.int32),
        torch.full((requests,), 2 * block_size, dtype=torch.int32),
        scale=1.0, num_kv_heads=1, forest="auto" if grouped else None, kernel=kernel,
    )  # fmt: skip
    assert (out == 0).all()  # else 2^-135 2^110 and more
    # what its thread computes elsewhere is as it was
    tiny = np.full(64, 2.0**-100, np.float32)
    assert (tiny * np.float32(2.0**-40) > 0).all()
