# SPDX-License-Identifier: Apache-2.0
"""Attention over a part of the tokens: outputs that can be merged by their log-sum-exps."""

from __future__ import annotations

import torch

_MAX_SCORES_BYTES = 64 << 20


def attention_state(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    *,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of every query over all keys of its head.

    Args:
        query: [heads, queries, head_size].
        keys, values: [heads, tokens, head_size] and [heads, tokens, value_size]; same dtype.
        causal: query i sees the keys 0 to i only; as many queries as keys.

    Returns:
        output float32 [heads, queries, value_size] and the natural logarithm of the softmax
        denominator, float32 [heads, queries]; zeros and -inf without keys.
    """
    num_heads, num_queries, head_size = query.shape
    if keys.shape[1] == 0:
        output = query.new_zeros(num_heads, num_queries, values.shape[2], dtype=torch.float32)
        return output, torch.full_like(output[..., 0], -torch.inf)
    if query.device.type == "cpu" and values.shape[2] == head_size:
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query[None], keys[None], values[None], is_causal=causal, scale=scale
        )
        return output[0].float(), lse[0].float()
    return _blocked(query, keys, values, scale, causal=causal)


def window_state(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `attention_state`, and the largest inner product of each query, float32 [heads, queries].

    -inf without keys.
    """
    products = query.float() @ keys.float().transpose(1, 2)
    logits = products * scale
    lse = logits.logsumexp(-1)
    if keys.shape[1] == 0:
        return query.new_zeros(*query.shape[:2], values.shape[2], dtype=torch.float32), lse, lse
    return logits.softmax(-1) @ values.float(), lse, products.amax(-1)


def _blocked(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """In float32, in blocks of queries, so that the scores stay small."""
    keys, values = keys.float(), values.float()
    num_heads, num_queries, _ = query.shape
    num_keys = keys.shape[1]
    block = max(1, _MAX_SCORES_BYTES // (4 * num_heads * num_keys))
    positions = torch.arange(num_keys, device=query.device)
    outputs, lses = [], []
    for begin in range(0, num_queries, block):
        logits = query[:, begin : begin + block].float() @ keys.transpose(1, 2) * scale
        if causal:
            own = positions[begin : begin + block, None]
            logits.masked_fill_(positions > own, -torch.inf)
        lses.append(logits.logsumexp(-1))
        outputs.append(logits.softmax(-1) @ values)
    return torch.cat(outputs, 1), torch.cat(lses, 1)
