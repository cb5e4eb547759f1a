# SPDX-License-Identifier: Apache-2.0
"""The public functions with the Triton kernels, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.attention_backends.strategies import AttentionProblem, error_bounds, random_problem
from vllm_relay.attention_backends import ops, reference


def problem(seed: int = 5, **keywords: Any) -> AttentionProblem:
    keywords = {"max_tokens": 200, "max_requests": 4, "dtype": torch.float32, **keywords}
    return random_problem(np.random.default_rng(seed), **keywords)


def with_plain_cache(packed: AttentionProblem) -> AttentionProblem:
    """Each token's key before its value, as GPUs have it."""
    key, value = reference.unpack_kv_cache(packed.kv_cache)
    return replace(packed, kv_cache=torch.cat([key, value], dim=-1))


@pytest.mark.parametrize("hides_tokens", [False, True], ids=["", "hidden"])
@pytest.mark.parametrize("seed", [5, 8, 11])
def test_every_kind_of_forest(seed: int, hides_tokens: bool) -> None:
    packed = problem(seed, hides_tokens=hides_tokens)
    plain = with_plain_cache(packed)
    expected, _ = packed.expected
    bound, _ = error_bounds(packed, sums_rounded_weights=True)
    alone = plain.solve(ops.relay_attention, kernel="triton", forest=None)
    assert ((alone[0].double() - expected).abs() <= bound).all()
    for forest in ("auto", packed.forest()):
        output, lse = plain.solve(ops.relay_attention, kernel="triton", forest=forest)
        assert torch.equal(output, alone[0]) and torch.equal(lse, alone[1])


def test_integers_of_64_bits_and_strided_tables() -> None:
    packed = problem()
    plain = with_plain_cache(packed)
    expected = plain.solve(ops.relay_attention, kernel="triton")
    strided = replace(
        plain,
        block_table=plain.block_table.T.contiguous().T,
        query_start_loc=plain.query_start_loc.long(),
        seq_lens=plain.seq_lens.long(),
    )
    output, lse = strided.solve(ops.relay_attention, kernel="triton")
    assert torch.equal(output, expected[0]) and torch.equal(lse, expected[1])


def test_empty_batch() -> None:
    cache = torch.zeros(2, 1, 16, 64)
    output, lse = ops.relay_attention(
        torch.zeros(0, 2, 32),
        cache,
        torch.zeros(0, 1, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
        torch.zeros(0, dtype=torch.int32),
        scale=1.0,
        num_kv_heads=1,
        kernel="triton",
    )
    assert output.shape == (0, 2, 32) and lse.shape == (0, 2)


def test_fp8_cache_written_and_read() -> None:
    torch.manual_seed(0)
    key, value = torch.randn(2, 20, 2, 32).bfloat16()
    query = torch.randn(1, 4, 32).bfloat16()
    slots = torch.arange(16, 36)
    table = torch.tensor([[1, 2]], dtype=torch.int32)
    arguments = (table, torch.tensor([0, 1]), torch.tensor([20]))
    exact = torch.zeros(4, 2, 16, 64, dtype=torch.bfloat16)
    fp8 = torch.zeros(4, 2, 16, 64).to(torch.float8_e4m3fn)
    scales = {"k_scale": 0.5, "v_scale": 0.25}
    ops.write_kv_cache(key, value, exact, slots, kernel="triton")
    ops.write_kv_cache(key, value, fp8, slots, kernel="triton", **scales)
    keywords = {"scale": 0.2, "num_kv_heads": 2, "kernel": "triton"}
    output, _ = ops.relay_attention(query, fp8, *arguments, **keywords, **scales)
    read = fp8.float()
    read[..., :32] *= 0.5
    read[..., 32:] *= 0.25
    expected, _ = ops.relay_attention(query, read.bfloat16(), *arguments, **keywords)
    torch.testing.assert_close(output, expected, rtol=2e-2, atol=2e-2)
    rounded, _ = ops.relay_attention(query, exact, *arguments, **keywords)
    torch.testing.assert_close(output, rounded, rtol=0.2, atol=0.2)


def test_what_is_refused() -> None:
    plain = with_plain_cache(problem())
    with pytest.raises(ValueError, match="scale: expected a positive number, got 0"):
        plain.solve(ops.relay_attention, kernel="triton", scale=0.0)
    forest = plain.forest()
    if len(forest.nodes):
        forest.nodes[0, 1] += 100
    else:
        forest = replace(forest, order=forest.order[:-1])
    with pytest.raises(ValueError, match="node 0 covers|orders"):
        plain.solve(ops.relay_attention, kernel="triton", forest=forest)
    meta = replace(plain, kv_cache=plain.kv_cache.to("meta"))
    with pytest.raises(ValueError, match="expected a CPU or CUDA tensor, got one on meta"):
        meta.solve(ops.relay_attention, kernel="triton")
    elsewhere = replace(plain, query=plain.query.to("meta"))
    with pytest.raises(ValueError, match="query: expected a tensor on cpu, got one on meta"):
        elsewhere.solve(ops.relay_attention, kernel="triton")
    with pytest.raises(ValueError, match="block size that is a multiple of 16, got 24"):
        ops.write_kv_cache(
            torch.zeros(1, 2, 32),
            torch.zeros(1, 2, 32),
            torch.zeros(2, 2, 24, 64),
            torch.zeros(1, dtype=torch.int64),
            kernel="triton",
        )
