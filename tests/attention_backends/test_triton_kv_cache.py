# SPDX-License-Identifier: Apache-2.0
"""Storing keys and values, and attention over a cache in fp8."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention_backends.exactness import assert_same_bits
from tests.attention_backends.strategies import AttentionProblem
from tests.attention_backends.triton_problems import (
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
from vllm_relay.attention_backends import reference
from vllm_relay.attention_backends.cuda.kernels.kv_cache import write_kv_cache

FP8 = torch.float8_e4m3fn
ONE = torch.ones(())


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Comparable where there is NaN."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return tensor.contiguous().view(sizes[tensor.element_size()])


def keys_and_values(
    num_tokens: int, heads: int, head_size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both are parts of one projection, as in vLLM."""
    generator = torch.Generator().manual_seed(num_tokens)
    projected = torch.randn((num_tokens, 3 * heads * head_size), generator=generator).to(dtype)
    key, value = projected.split([heads * head_size, 2 * heads * head_size], 1)
    return key.unflatten(1, (heads, -1)), value.unflatten(1, (2 * heads, -1))[:, heads:]


@pytest.mark.parametrize(
    ("dtype", "head_size"),
    [
        (torch.float32, 80),
        (torch.float16, 256),
        (torch.bfloat16, 64),
        (torch.bfloat16, 96),
        (torch.float16, 160),
    ],
    ids=str,
)
@pytest.mark.parametrize("tokens_first", [False, True], ids=["heads first", "tokens first"])
def test_stores_bits_in_slots_and_nothing_elsewhere(dtype, head_size, tokens_first):
    blocks, heads, block_size = 4, 2, 16
    key, value = keys_and_values(6, heads, head_size, dtype)
    empty = torch.full((blocks, heads, block_size, 2 * head_size), torch.nan).to(dtype)
    cache = strided(empty.transpose(1, 2)).transpose(1, 2) if tokens_first else strided(empty)
    whole_before = cache._base.clone()
    slots = torch.tensor([17, -1, 63, 16, 0, -1])
    write_kv_cache(key, value, cache, slots, ONE, ONE)

    expected = empty.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            stored = torch.cat((key[token], value[token]), -1)
            expected[slot // block_size, :, slot % block_size] = stored
    assert torch.equal(bits(cache), bits(expected))
    assert (bits(cache._base) != bits(whole_before)).sum() == (bits(cache) != bits(empty)).sum()


def test_padding_behind_the_slots_is_left_out():
    """In padded graphs there are more tokens than slots, or more slots than tokens."""
    key, value = keys_and_values(5, 1, 32, torch.bfloat16)
    for num_tokens, num_slots in ((5, 3), (3, 5), (0, 5), (5, 0)):
        cache = torch.zeros((1, 1, 16, 64), dtype=torch.bfloat16)
        slots = torch.arange(num_slots)
        write_kv_cache(key[:num_tokens], value[:num_tokens], cache, slots, ONE, ONE)
        written = min(num_tokens, num_slots)
        assert torch.equal(cache[0, 0, :written, :32], key[:written, 0])
        assert torch.equal(cache[0, 0, :written, 32:], value[:written, 0])
        assert not cache[0, 0, written:].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_fp8_holds_scaled_numbers_rounded_and_saturated(dtype):
    numbers = [0.0, -0.0, 1.0, 448.0, 449.0, 464.0, 480.0, -1000.0, 60000.0, -60000.0]
    numbers += [2.0**-9, 2.0**-10, 3 * 2.0**-10, -(2.0**-6), 1.0625, 1.1875, 17.0, 19.0, 0.3, 7.7]
    key = torch.tensor([numbers + [5.0] * 12], dtype=dtype)[:, None]
    value = key.flip(-1)
    k_scale, v_scale = torch.tensor(0.5), torch.tensor(4.0)
    cache = torch.zeros((1, 1, 16, 64), dtype=FP8)
    write_kv_cache(key, value, cache, torch.tensor([9]), k_scale, v_scale)
    for stored, numbers, scale in (
        (cache[0, 0, 9, :32], key[0, 0], k_scale),
        (cache[0, 0, 9, 32:], value[0, 0], v_scale),
    ):
        expected = (numbers.float() / scale).clamp(-448, 448).to(FP8)
        assert torch.equal(bits(stored), bits(expected))
        assert not stored.float().isnan().any()


def in_fp8(
    problem: AttentionProblem, k_scale: torch.Tensor, v_scale: torch.Tensor
) -> tuple[torch.Tensor, AttentionProblem]:
    """The cache of a problem in fp8, and the problem with what it stands for."""
    key, value = reference.unpack_kv_cache(problem.kv_cache)
    scaled = torch.cat((key.float() / k_scale, value.float() / v_scale), -1)
    cache = scaled.clamp(-448, 448).to(FP8)
    scales = torch.cat((k_scale.expand(key.shape[-1]), v_scale.expand(key.shape[-1])))
    key, value = (cache.float() * scales).chunk(2, -1)
    kv_cache = reference.pack_kv_cache(key.contiguous(), value.contiguous())
    return cache, replace(problem, kv_cache=kv_cache)


def check_fp8(problem: AttentionProblem, k_scale: float, v_scale: float) -> None:
    scales = {"k_scale": torch.tensor(k_scale), "v_scale": torch.tensor(v_scale)}
    cache, dequantised = in_fp8(problem, **scales)
    alone = solve(problem, kv_cache=cache, **scales)
    assert_exact_enough(dequantised, *alone)
    shared = solve(problem, problem.forest(), kv_cache=cache, num_programs=1, **scales)
    assert_same_bits(shared, alone, problem.description)


@settings(max_examples=cases(2))
@given(
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    scales=st.tuples(*2 * [st.sampled_from([1.0, 0.037, 2.5])]),
)
def test_attention_over_fp8(seed, dtype, scales):
    problem = small_problem(np.random.default_rng(seed), dtype=dtype, data="random")
    check_fp8(problem, *scales)


@pytest.mark.parametrize("head_size", [80, 128])
def test_attention_over_fp8_with_every_feature(head_size):
    problem = tree_problem(
        paths_of_levels([1, 2, 3], [3, 2, 1]),
        tails=[1, 20, 30],
        query_lens=[1, 3, 1],
        heads=(4, 2),
        head_size=head_size,
        features=every_feature(4),
    )
    check_fp8(problem, 0.05, 0.3)


def test_what_is_written_is_read():
    """Write kernel and attention kernel agree on the layout, in fp8 and out of it."""
    problem = tree_problem([[("a", 2)]] * 2, tails=[5, 9], heads=(2, 2))
    tokens = cuda_cache(problem)
    key, value = tokens.transpose(1, 2).flatten(0, 1).chunk(2, -1)
    slots = torch.arange(key.shape[0])
    slots[~key.isfinite().all(-1).all(-1)] = -1
    written = torch.full_like(tokens, torch.nan)
    write_kv_cache(key, value, written, slots, ONE, ONE)
    assert_same_bits(solve(problem, kv_cache=written), solve(problem))

    k_scale, v_scale = torch.tensor(0.02), torch.tensor(0.5)
    cache, _ = in_fp8(problem, k_scale, v_scale)
    written = torch.full_like(cache, torch.nan)
    write_kv_cache(key, value, written, slots, k_scale, v_scale)
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    assert_same_bits(
        solve(problem, kv_cache=written, **scales), solve(problem, kv_cache=cache, **scales)
    )


def test_blocks_beyond_2_31_elements():
    """Of 2 GiB only the pages of one block are touched."""
    problem = tree_problem([[]], tails=[16], head_size=64)
    small = cuda_cache(problem)[problem.block_table[0, :1].long()].to(FP8)
    blocks = 2**31 // small.numel() + 2
    large = torch.empty((blocks, *small.shape[1:]), dtype=FP8)
    key, value = small[0, 0].float()[:, None].chunk(2, -1)
    slots = (blocks - 1) * 16 + torch.arange(16)
    write_kv_cache(key, value, large, slots, ONE, ONE)
    assert torch.equal(bits(large[-1]), bits(small[0]))

    near = replace(problem, block_table=torch.tensor([[0]], dtype=torch.int32))
    far = replace(problem, block_table=torch.tensor([[blocks - 1]], dtype=torch.int32))
    assert_same_bits(solve(far, kv_cache=large), solve(near, kv_cache=small))
