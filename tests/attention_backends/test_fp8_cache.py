# SPDX-License-Identifier: Apache-2.0
"""KV caches in fp8 on CPUs: what is stored, and attention over it, which is to the last bit that
over a cache of the queries' dtype with the same numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention_backends.exactness import assert_same_bits
from tests.attention_backends.strategies import DTYPES, in_fp8, random_problem
from tests.attention_backends.test_divided_segments import long_problem, planned_for
from tests.attention_backends.test_ops import bounds_of, every_kernel
from tests.support.depth import cases
from vllm_relay.attention_backends import ops, reference

FP8 = torch.float8_e4m3fn
SEEDS = st.integers(0, 2**32 - 1)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


@every_kernel
@settings(max_examples=cases(4))
@given(seed=SEEDS)
def test_result_is_that_of_the_same_numbers_to_the_bit(kernel, dtype, seed):
    rng = np.random.default_rng(seed)
    narrow, wide = in_fp8(random_problem(rng, dtype=dtype, hides_tokens=bool(rng.integers(2))))
    expected = wide.solve(ops.relay_attention, kernel=kernel, forest=None)
    for num_threads, forest in [(1, None), (1, "auto"), (3, narrow.forest())]:
        torch.set_num_threads(num_threads)
        result = narrow.solve(ops.relay_attention, kernel=kernel, forest=forest)
        assert_same_bits(result, expected, narrow.description)


@every_kernel
@pytest.mark.parametrize("window", [None, 1500])
def test_long_sequences(kernel, dtype, window):
    """Several segments, one of which outgrows its first reference; then divided among threads."""
    features = {"sliding_window": window} if window else {}
    narrow, wide = in_fp8(long_problem(dtype, **features))
    expected = wide.solve(ops.relay_attention, kernel=kernel)
    result = narrow.solve(ops.relay_attention, kernel=kernel)
    assert_same_bits(result, expected, narrow.description)
    with planned_for(200) as plans:
        result = narrow.solve(ops.relay_attention, kernel=kernel)
    assert len(plans[0].work.divisions)
    assert_same_bits(result, expected, f"divided, {narrow.description}")


@every_kernel
@settings(max_examples=cases(2))
@given(
    seed=SEEDS,
    k_scale=st.sampled_from([1.0, 0.037, 2.5]),
    v_scale=st.sampled_from([1.0, 0.037, 2.5]),
)
def test_scales_are_factors_of_keys_and_values(kernel, dtype, seed, k_scale, v_scale):
    narrow, wide = in_fp8(random_problem(np.random.default_rng(seed), dtype=dtype, data="random"))
    output, lse = narrow.solve(ops.relay_attention, kernel=kernel, k_scale=k_scale, v_scale=v_scale)
    scaled = replace(wide, scale=wide.scale * k_scale)
    output_bound, lse_bound = bounds_of(scaled, kernel)
    expected, expected_lse = scaled.expected
    assert ((output.double() - v_scale * expected).abs() <= 1.01 * v_scale * output_bound).all()
    seen = expected_lse != -torch.inf
    assert ((lse.double() - expected_lse).abs() <= lse_bound)[seen].all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number_is_read_and_written_back(dtype):
    """One token whose value is every fp8 number once: its output is its value."""
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8)
    numbers = numbers.where(~numbers.float().isnan(), torch.zeros((), dtype=FP8))
    cache = torch.zeros(2, 1, 32, 512, dtype=FP8)
    value = numbers.to(dtype).view(1, 1, 256)
    slots = torch.tensor([37])
    ops.write_kv_cache(torch.zeros_like(value), value, cache, slots)
    output, _ = ops.relay_attention(
        torch.ones(1, 1, 256, dtype=dtype),
        cache,
        torch.ones(1, 1, dtype=torch.int32),
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([6], dtype=torch.int32),
        scale=1.0,
        num_kv_heads=1,
        sliding_window=1,
    )
    assert torch.equal(output, value)
    assert torch.equal(reference.unpack_kv_cache(cache.to(dtype))[1][1, 0, 5], value[0, 0])


@settings(max_examples=cases(25))
@given(seed=SEEDS)
def test_stored_are_the_nearest_numbers(seed):
    rng = np.random.default_rng(seed)
    dtype = DTYPES[rng.integers(3)]
    num_blocks, num_kv_heads = int(rng.integers(1, 5)), int(rng.integers(1, 4))
    block_size, head_size = 32 * int(rng.integers(1, 5)), 16 * int(rng.integers(2, 17))
    tokens = int(rng.integers(0, num_blocks * block_size + 1))
    k_scale, v_scale = (float(scale) for scale in rng.choice([1.0, 0.037, 2.5], 2))
    magnitudes = 2.0 ** rng.integers(-13, 13, (2, tokens, num_kv_heads, head_size))
    key, value = torch.from_numpy(rng.standard_normal(magnitudes.shape) * magnitudes).to(dtype)
    numbers = torch.arange(127, dtype=torch.uint8).view(FP8).float()
    halfway = ((numbers[1:] + numbers[:-1]) / 2)[torch.from_numpy(rng.integers(0, 126, key.shape))]
    key = key.where(torch.from_numpy(rng.random(key.shape) < 0.7), halfway.to(dtype))
    slots = torch.from_numpy(rng.permutation(num_blocks * block_size)[:tokens])
    slots[torch.from_numpy(rng.random(tokens) < 0.2)] = -1
    shape = (num_blocks, num_kv_heads, block_size, 2 * head_size)
    written = torch.from_numpy(rng.integers(0, 127, shape)).to(torch.uint8).view(FP8)
    # packed as the dtype is, which has all of them
    expected = written.to(dtype)
    torch.set_num_threads(int(rng.integers(1, 4)))
    ops.write_kv_cache(key, value, written, slots, k_scale=k_scale, v_scale=v_scale)
    nearest = [
        (numbers.float() / scale).clamp(-448, 448).to(FP8).to(dtype)
        for numbers, scale in ((key, k_scale), (value, v_scale))
    ]
    reference.write_kv_cache(*nearest, expected, slots)
    assert torch.equal(bits(written), bits(expected.to(FP8)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_too_large_and_what_is_no_number(dtype):
    numbers = [448.0, 449.0, 464.0, 480.0, -1000.0, torch.inf, -torch.inf, torch.nan, -torch.nan]
    key = torch.zeros(1, 1, 32)
    key[..., : len(numbers)] = torch.tensor(numbers)
    cache = torch.zeros(1, 1, 32, 64, dtype=FP8)
    ops.write_kv_cache(key.to(dtype), key.to(dtype), cache, torch.tensor([9]))
    for stored in reference.unpack_kv_cache(cache.to(dtype)):
        assert stored[0, 0, 9, :7].tolist() == [448.0] * 4 + [-448.0, 448.0, -448.0]
        assert stored[0, 0, 9, 7:9].isnan().all()
        assert not stored[0, 0, 9, 9:].any()


def test_error_against_what_was_not_quantised():
    """Of random keys and values: a few hundredths."""
    problem = random_problem(
        np.random.default_rng(0), dtype=torch.bfloat16, data="random", use_features=False
    )
    narrow, _ = in_fp8(problem)
    output, lse = narrow.solve(ops.relay_attention)
    expected, expected_lse = problem.expected
    error = (output.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert 0.001 < error < 2.0**-4  # half of the step between neighbours, relative
    assert (lse.double() - expected_lse).abs().nan_to_num().max() < 0.25


def test_arguments_that_do_not_go_with_the_cache():
    cache = torch.zeros(5, 2, 32, 64, dtype=FP8)
    key, slots = torch.zeros(3, 2, 32), torch.tensor([40, -1, 41])
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"^k_scale: given .*, expected a positive number"):
            ops.write_kv_cache(key, key, cache, slots, k_scale=scale)
    with pytest.raises(ValueError, match="^v_scale: given 2.0, expected 1 for a cache of"):
        ops.write_kv_cache(key, key, cache.float(), slots, v_scale=2.0)
    with pytest.raises(ValueError, match="^key: expected"):
        ops.write_kv_cache(key.to(FP8), key, cache, slots)
    with pytest.raises(ValueError, match="^kv_cache: expected"):
        ops.write_kv_cache(key, key, cache.view(torch.uint8), slots)
