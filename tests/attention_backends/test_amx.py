# SPDX-License-Identifier: Apache-2.0
"""What the kernel for tile registers does otherwise than the others, on the machine's tiles and on
those in memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.attention_backends.exactness import assert_same_bits
from tests.attention_backends.strategies import problem_of_table
from vllm_relay.attention_backends import ops
from vllm_relay.attention_backends.cpu import kernels as cpu

KERNELS = [name for name in cpu.usable_kernels(torch.bfloat16) if name.startswith("amx")]
every_kernel = pytest.mark.parametrize("kernel", KERNELS)


@every_kernel
@pytest.mark.parametrize("dims", [(0, 1, 2), (3, 8, 31)])
def test_even_and_odd_products_are_summed_apart(kernel: str, dims: tuple[int, int, int]) -> None:
    """2^25 + 1 - 2^25 is 1 only if the one in the middle is not added to 2^25: so a score tells in
    which order its products were added."""
    big, one, negative = dims
    key = torch.zeros(1, 1, 32, dtype=torch.bfloat16)
    key[..., big], key[..., one], key[..., negative] = 2.0**25, 1, -(2.0**25)
    kv_cache = torch.zeros(2, 1, 32, 64, dtype=torch.bfloat16)
    ops.write_kv_cache(key, key, kv_cache, torch.tensor([32]))
    _, lse = ops.relay_attention(
        torch.ones(1, 1, 32, dtype=torch.bfloat16),
        kv_cache,
        torch.ones(1, 1, dtype=torch.int32),
        torch.tensor([0, 1], dtype=torch.int32),
        torch.ones(1, dtype=torch.int32),
        scale=1.0,
        num_kv_heads=1,
        kernel=kernel,
    )
    are_apart = big % 2 == negative % 2 != one % 2
    assert lse.item() == pytest.approx(1.0 if are_apart else 0.0, abs=2.0**-7)


@every_kernel
@pytest.mark.parametrize("prefix_blocks", [1, 3, 5, 15, 16, 17, 19, 33])
@pytest.mark.parametrize("num_requests", [9, 20])
def test_parts_of_chunks_are_pipelined_without_a_trace(
    kernel: str, prefix_blocks: int, num_requests: int
) -> None:
    """Rows together, which all see whole tiles of a prefix, and each alone, which is not
    pipelined."""
    rng = np.random.default_rng(prefix_blocks)
    width = prefix_blocks + 2
    table = np.arange(1, 1 + num_requests * width).reshape(num_requests, width).astype(np.int32)
    table[:, :prefix_blocks] = table[0, :prefix_blocks]
    problem = problem_of_table(
        rng,
        table,
        rng.integers(prefix_blocks * 32 + 1, width * 32 + 1, num_requests),
        np.ones(num_requests, np.int64),
        num_blocks=int(table.max()) + 1,
        dtype=torch.bfloat16,
        data="random",
        features={},
        heads=(2, 1),
        head_size=48,
        block_size=32,
    )
    together = problem.solve(ops.relay_attention, kernel=kernel, forest=problem.forest())
    alone = problem.solve(ops.relay_attention, kernel=kernel, forest=None)
    assert_same_bits(together, alone, problem.description)
