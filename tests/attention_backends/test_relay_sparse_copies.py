# SPDX-License-Identifier: Apache-2.0
"""Keys and values of KV blocks that others have computed, on their way to the host's memory."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.depth import cases
from vllm_relay.attention_backends.cpu import kernels as cpu
from vllm_relay.attention_backends.sparse import cpu as sparse_cpu
from vllm_relay.long_context.host.host_sequence import EncodingBudget, HostLayer, SequencePlace

KV_HEADS, HEAD_SIZE, BLOCK_TOKENS = 2, 32, 16
NUM_BLOCKS = 24


@settings(max_examples=cases(40), deadline=None)
@given(
    begin=st.integers(0, 40),
    there=st.integers(0, 90),
    found=st.integers(0, 200),
    own=st.integers(1, 40),
    copied_tokens=st.sampled_from([1, BLOCK_TOKENS, 3 * BLOCK_TOKENS + 5, 1024]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_what_others_have_computed_is_unpacked_piece_by_piece(
    begin: int, there: int, found: int, own: int, copied_tokens: int, dtype: torch.dtype
) -> None:
    """Behind a stored context, and behind what the host has already."""
    num_tokens = begin + there + found + own
    generator = torch.Generator().manual_seed(num_tokens)
    keys, values = (
        torch.randn(num_tokens, KV_HEADS, HEAD_SIZE, generator=generator).to(dtype)
        for _ in range(2)
    )
    blocks = torch.randperm(NUM_BLOCKS, generator=generator).int()
    kv_cache = torch.zeros(NUM_BLOCKS, KV_HEADS, BLOCK_TOKENS, 2 * HEAD_SIZE, dtype=dtype)
    at = torch.arange(num_tokens)
    slots = blocks[at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS
    cpu.write_kv_cache(keys, values, kv_cache, slots.long())
    layer = HostLayer(SequencePlace(begin, 400, 0, 0, 0), KV_HEADS, HEAD_SIZE, dtype)
    if there:
        layer.write(begin, keys[begin : begin + there], values[begin : begin + there])
    computed = num_tokens - own
    row = SimpleNamespace(num_computed_tokens=computed, blocks=blocks.numpy())
    unpacked: list[int] = []
    copied: list[int] = []
    unpack_tokens = sparse_cpu.unpack_tokens

    def unpack(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        unpacked.append(len(blocks))
        return unpack_tokens(blocks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EncodingBudget, "copy", lambda self, num: copied.append(num))
        patch.setattr(sparse_cpu, "COPIED_TOKENS", copied_tokens)
        patch.setattr(sparse_cpu, "unpack_tokens", unpack)
        sparse_cpu._mirror(row, layer, keys[computed:], values[computed:], kv_cache)
    assert layer.end == num_tokens and sum(copied) == found
    for expected, found_rows in zip((keys, values), layer.rows(begin, num_tokens), strict=True):
        np.testing.assert_array_equal(
            expected[begin:].transpose(0, 1).float().numpy(), found_rows.float().numpy()
        )
    assert max(unpacked, default=0) <= max(1, copied_tokens // BLOCK_TOKENS)
