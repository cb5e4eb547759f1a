# SPDX-License-Identifier: Apache-2.0
"""FlashAttention in plain torch, as far as RELAY and vLLM's backend call it: what stands for it
where there is no GPU."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch

IGNORED = {"scheduler_metadata", "fa_version", "num_splits"}
"""Arguments that say how, not what."""


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_k: int,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    softmax_scale: float,
    causal: bool = False,
    window_size: list[int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    return_softmax_lse: bool = False,
    out: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    **how: Any,
) -> Any:
    """Paged keys and values, [num_blocks, block_size, kv heads, head_size]. Rows of no sequence
    are NaN, whatever they were; lse is float32 [heads, rows]."""
    assert all(how[name] is None for name in how.keys() - IGNORED), how
    if (schedule := how.get("scheduler_metadata")) is not None:
        expected = get_scheduler_metadata(
            batch_size=len(seqused_k), max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
            num_heads_q=q.shape[1], num_heads_kv=k.shape[2], headdim=q.shape[2],
            cache_seqlens=seqused_k, qkv_dtype=q.dtype, cu_seqlens_q=cu_seqlens_q,
            page_size=k.shape[1], causal=causal, num_splits=how["num_splits"],
            window_size=tuple(window_size or (-1, -1)),
        )  # fmt: skip
        torch.testing.assert_close(schedule, expected, rtol=0, atol=0)
    assert alibi_slopes is None
    num_rows, num_heads, head_size = q.shape
    block_size, num_kv_heads = k.shape[1:3]
    group = num_heads // num_kv_heads
    starts, lens = cu_seqlens_q.tolist(), seqused_k.tolist()
    assert len(starts) == len(lens) + 1 == len(block_table) + 1
    out = torch.empty_like(q) if out is None else out
    assert out.shape == q.shape
    out.fill_(torch.nan)
    # rows that see nothing, too: FlashAttention 2 and 3 do not agree on these
    lse = torch.full((num_heads, num_rows), torch.nan)
    left, right = window_size or (-1, -1)
    for number, num_keys in enumerate(lens):
        rows = slice(starts[number], starts[number + 1])
        num_queries = rows.stop - rows.start
        assert 0 <= num_queries <= max_seqlen_q and num_keys <= max_seqlen_k
        if not num_queries:
            continue
        blocks = block_table[number, : -(-num_keys // block_size)].long()
        keys, values = (
            cache[blocks].flatten(0, 1)[:num_keys].double().repeat_interleave(group, 1)
            for cache in (k, v)
        )
        queries = q[rows].double()
        if q_descale is not None:
            queries = queries * q_descale[number].double().repeat_interleave(group)[:, None]
        if k_descale is not None:
            keys = keys * k_descale[number].double().repeat_interleave(group)[:, None]
        if v_descale is not None:
            values = values * v_descale[number].double().repeat_interleave(group)[:, None]
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * softmax_scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        distance = (
            torch.arange(num_keys) - (torch.arange(num_queries) + num_keys - num_queries)[:, None]
        )
        is_hidden = torch.zeros_like(distance, dtype=torch.bool)
        if causal or right >= 0:
            is_hidden |= distance > max(right, 0)
        if left >= 0:
            is_hidden |= distance < -left
        scores = scores.masked_fill(is_hidden, -torch.inf)
        if s_aux is not None:
            sinks = s_aux.double()[:, None, None].expand(-1, num_queries, 1)
            scores = torch.cat((scores, sinks), 2)
            values = torch.cat((values, values.new_zeros(1, num_heads, head_size)))
        weights = scores.softmax(2).nan_to_num()  # a row that sees nothing is 0
        out[rows] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)
        sums = scores.logsumexp(2).float()
        lse[:, rows] = sums.where(sums > -torch.inf, torch.nan)
    return (out, lse) if return_softmax_lse else out


def reshape_and_cache_flash(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *how: Any,
) -> None:
    """Store keys and values, but for slots of -1."""
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    block, offset = slots // key_cache.shape[1], slots % key_cache.shape[1]
    key_cache[block, offset] = key[: len(slot_mapping)][kept]
    value_cache[block, offset] = value[: len(slot_mapping)][kept]


def get_scheduler_metadata(
    *, batch_size: int, cache_seqlens: torch.Tensor, cu_seqlens_q: torch.Tensor, **how: Any
) -> torch.Tensor:
    """FlashAttention 3's: as long as its own, and another for any other arguments."""
    assert batch_size == len(cache_seqlens) == len(cu_seqlens_q) - 1
    padded = -(-batch_size // 4) * 4
    schedule = torch.zeros(1 + 4 * padded, dtype=torch.int32)
    schedule[0] = zlib.crc32(repr(sorted(how.items())).encode()) >> 1
    schedule[1 : 1 + batch_size] = cache_seqlens
    schedule[1 + padded : 1 + padded + batch_size] = cu_seqlens_q.diff()
    return schedule


def get_flash_attn_version(**features: Any) -> int:
    return 2


def flash_attn_supports_quant_query_input() -> bool:
    return False


STOOD_FOR = (
    "flash_attn_varlen_func",
    "get_scheduler_metadata",
    "reshape_and_cache_flash",
    "get_flash_attn_version",
    "flash_attn_supports_quant_query_input",
)


def stand_in(set_attribute: Callable[..., None] = setattr) -> None:
    """Let vLLM's FlashAttention backend call what is here, as FlashAttention 2.

    Args:
        set_attribute: takes what `setattr` takes; what is set need not be there.
    """
    from vllm.v1.attention.backends import flash_attn

    for name in STOOD_FOR:
        set_attribute(flash_attn, name, globals()[name])
