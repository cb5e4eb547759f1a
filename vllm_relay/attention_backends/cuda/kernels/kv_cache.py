# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel that stores new keys and values in a paged KV cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

FP8_MAX: tl.constexpr = tl.constexpr(448.0)


@triton.jit
def write_kernel(
    key_ptr, value_ptr, kv_ptr, slot_mapping_ptr, k_scale_ptr, v_scale_ptr,
    key_stride_token, key_stride_head, value_stride_token, value_stride_head,
    kv_stride_block, kv_stride_head, kv_stride_token,
    HEAD_SIZE: tl.constexpr, PADDED_HEAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    IS_FP8: tl.constexpr,
):  # fmt: skip
    """One program stores one head of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:
        return
    dim = tl.arange(0, PADDED_HEAD)
    mask = dim < HEAD_SIZE
    key = tl.load(key_ptr + token * key_stride_token + head * key_stride_head + dim, mask=mask)
    value = tl.load(
        value_ptr + token * value_stride_token + head * value_stride_head + dim, mask=mask
    )
    if IS_FP8:  # saturates, as the conversion of vLLM's own kernels does
        key = key.to(tl.float32) / tl.load(k_scale_ptr)
        value = value.to(tl.float32) / tl.load(v_scale_ptr)
        key = tl.clamp(key, -FP8_MAX, FP8_MAX)
        value = tl.clamp(value, -FP8_MAX, FP8_MAX)
    target = (
        kv_ptr
        + slot // BLOCK_SIZE * kv_stride_block
        + head * kv_stride_head
        + slot % BLOCK_SIZE * kv_stride_token
        + dim
    )
    tl.store(target, key.to(kv_ptr.dtype.element_ty), mask=mask)
    tl.store(target + HEAD_SIZE, value.to(kv_ptr.dtype.element_ty), mask=mask)


def write_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """Stores key and value [tokens, num_kv_heads, head_size] in the slots of `slot_mapping`, int64
    [tokens] with negative entries for tokens to leave out; an fp8 cache holds them divided by the
    float32 scalars `k_scale` and `v_scale`."""
    num_tokens, num_kv_heads, head_size = key.shape
    num_tokens = min(num_tokens, slot_mapping.shape[0])
    if num_tokens == 0:
        return
    write_kernel[(num_tokens, num_kv_heads)](
        key, value, kv_cache, slot_mapping, k_scale, v_scale,
        *key.stride()[:2], *value.stride()[:2], *kv_cache.stride()[:3],
        HEAD_SIZE=head_size,
        PADDED_HEAD=triton.next_power_of_2(head_size),
        BLOCK_SIZE=kv_cache.shape[2],
        IS_FP8=kv_cache.dtype == torch.float8_e4m3fn,
        num_warps=1,
    )  # fmt: skip
