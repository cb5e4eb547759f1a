# SPDX-License-Identifier: Apache-2.0
"""Paged attention in plain float64 torch: the oracle of every kernel, and the slowest of them.

Same functions and signatures as `vllm_relay.attention_backends.ops`. Nothing is fused, split or
shared here: each request gathers the keys and values it sees and takes one softmax.
"""

import torch

from vllm_relay.attention_backends.hidden_tokens import HiddenTokens

TOKENS_PER_PANEL = 16  # both K and V are stored in panels 16 wide: 16 tokens of K, 16 dims of V


def write_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Copies the keys and values of new tokens into their slots, bit for bit.

    Args:
        key, value: [tokens, num_kv_heads, head_size], in the dtype of `kv_cache`; tokens past the
            end of `slot_mapping` are ignored.
        kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_size], written in place.
        slot_mapping: int64 [tokens]: block id * block_size + offset, all different; negative for
            a token that is not to be stored.
    """
    if key.dtype != kv_cache.dtype or value.dtype != kv_cache.dtype:
        raise TypeError(
            f"key and value must have the dtype of kv_cache: got {key.dtype} and {value.dtype}, "
            f"kv_cache is {kv_cache.dtype}"
        )
    written = slot_mapping >= 0
    slots = slot_mapping[written]
    block_ids, offsets = slots // kv_cache.shape[2], slots % kv_cache.shape[2]
    bits = torch.int32 if kv_cache.dtype == torch.float32 else torch.int16
    for tokens, slot_view in zip((key, value), _slot_views(kv_cache), strict=True):
        _, rows, row_size, *packed_shape = slot_view.shape
        assert rows * row_size == kv_cache.shape[2]
        packed_tokens = (
            tokens[: len(written)][written].contiguous().view(bits).view(-1, *packed_shape)
        )
        slot_view.view(bits)[block_ids, offsets // row_size, offsets % row_size] = packed_tokens


def relay_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    num_kv_heads: int,
    forest: object = "auto",
    sliding_window: int | None = None,
    alibi_slopes: torch.Tensor | list[float] | None = None,
    logits_soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    hidden: HiddenTokens | None = None,
    out: torch.Tensor | None = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of the query tokens of each request over its paged keys and values.

    Query token i of the n of a request stands at position seq_len - n + i and sees positions
    0..its own, or with a sliding window only the last `sliding_window` of those. Scores go through
    scale, soft cap, ALiBi and softmax, in this order. Only slots that some query token sees are
    read; all others may hold anything, NaN included.

    Args:
        query: [tokens, num_heads, head_size].
        kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_size].
        block_table: int32 [num_requests, max_blocks].
        query_start_loc: int32 [num_requests + 1].
        seq_lens: int32 [num_requests], query tokens included.
        scale: multiplies query * key.
        num_kv_heads: heads of `kv_cache`; a divisor of num_heads.
        forest: ignored: how the work is shared does not change the result.
        sliding_window: tokens that a query token sees, itself included; None or 0 for all.
        alibi_slopes: [num_heads]; adds slope * (kv position - query position).
        logits_soft_cap: caps scores as cap * tanh(score / cap); None or 0 leaves them.
        sinks: [num_heads]; one more logit per head that has no value.
        hidden: tokens that the query tokens of a request do not see.
        out: where to put the output.
        output_dtype: of the output, `query.dtype` unless given.

    Returns:
        output: [tokens, num_heads, head_size]; zeros for a token which sees nothing.
        lse: [tokens, num_heads], natural log of the softmax denominator, sink included; -inf for
            an empty denominator. float32, or float64 if `output_dtype` is float64.
    """
    num_tokens, num_heads, head_size = query.shape
    if kv_cache.shape[1] != num_kv_heads or num_heads % num_kv_heads:
        raise ValueError(
            f"num_kv_heads is {num_kv_heads}, but kv_cache has {kv_cache.shape[1]} heads "
            f"and query has {num_heads}"
        )
    output = torch.zeros(num_tokens, num_heads, head_size, dtype=torch.float64)
    lse = torch.full((num_tokens, num_heads), -torch.inf, dtype=torch.float64)
    for request, seq_len in enumerate(seq_lens.tolist()):
        begin, end = query_start_loc[request : request + 2].tolist()
        query_positions = torch.arange(seq_len - (end - begin), seq_len)
        first_seen = 0
        if sliding_window and begin < end:
            first_seen = max(0, int(query_positions[0]) - sliding_window + 1)
        kv_positions = torch.arange(first_seen, seq_len if begin < end else first_seen)
        if hidden is not None:
            pieces = hidden.visible_pieces(request, 0, len(kv_positions))
            kv_positions = torch.cat(
                [torch.empty(0, dtype=torch.int64)] + [torch.arange(*piece) for piece in pieces]
            )
        key, value = _gather(kv_cache, block_table[request], kv_positions)
        distance = kv_positions - query_positions[:, None]  # [n, kv]
        is_masked = distance > 0
        if sliding_window:
            is_masked |= distance <= -sliding_window

        # [num_kv_heads, queries per kv head, n, kv]
        grouped_query = query[begin:end].double().unflatten(1, (num_kv_heads, -1))
        scores = torch.einsum("nkgd,ckd->kgnc", grouped_query, key) * scale
        if logits_soft_cap:
            scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
        if alibi_slopes is not None:
            slopes = torch.as_tensor(alibi_slopes).double().view(num_kv_heads, -1, 1, 1)
            scores = scores + slopes * distance
        scores = scores.masked_fill(is_masked, -torch.inf)

        logits = scores
        if sinks is not None:
            sink = sinks.double().view(num_kv_heads, -1, 1, 1).expand(*scores.shape[:3], 1)
            logits = torch.cat([scores, sink], dim=-1)
        request_lse = torch.logsumexp(logits, dim=-1, keepdim=True)
        weights = torch.exp(scores - request_lse).masked_fill(is_masked, 0.0)
        output[begin:end] = torch.einsum("kgnc,ckd->nkgd", weights, value).flatten(1, 2)
        lse[begin:end] = request_lse.squeeze(-1).permute(2, 0, 1).flatten(1, 2)

    output = output.to(output_dtype or query.dtype)
    if output_dtype is not torch.float64:
        lse = lse.float()
    return (output, lse) if out is None else (out.copy_(output), lse)


def merge_states(
    output_a: torch.Tensor,
    lse_a: torch.Tensor,
    output_b: torch.Tensor,
    lse_b: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Joins attention over two disjoint sets of keys into attention over both.

    A state with lse -inf saw no keys, and so did one with lse +inf, which is how some kernels
    mark it: its output is not looked at. Two such states give zeros and -inf.

    Args:
        output_a, output_b: [tokens, num_heads, head_size].
        lse_a, lse_b: [tokens, num_heads], natural logs of the softmax denominators.

    Returns:
        output, lse: in the shapes and dtypes of `output_a` and `lse_a`.
    """
    lse = torch.stack([lse_a, lse_b]).double()
    empty = torch.isinf(lse)
    largest = lse.masked_fill(empty, torch.finfo(torch.float64).min).amax(dim=0)
    weights = torch.exp(lse - largest).masked_fill(empty, 0.0)
    total = weights.sum(dim=0)
    shares = (weights / total).masked_fill(empty, 0.0)[..., None]
    outputs = torch.stack([output_a, output_b]).double().masked_fill(empty[..., None], 0.0)
    merged_lse = largest + total.log()
    return (shares * outputs).sum(dim=0).to(output_a.dtype), merged_lse.to(lse_a.dtype)


def pack_kv_cache(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Builds a KV cache out of the keys and values of all its slots.

    Args:
        key, value: [num_blocks, num_kv_heads, block_size, head_size].

    Returns:
        [num_blocks, num_kv_heads, block_size, 2 * head_size] in the dtype of `key`.
    """
    num_blocks, num_kv_heads, block_size, head_size = key.shape
    kv_cache = key.new_empty(num_blocks, num_kv_heads, block_size, 2 * head_size)
    for tokens, slot_view in zip((key, value), _slot_views(kv_cache), strict=True):
        slot_view.copy_(tokens.transpose(1, 2).reshape(slot_view.shape))
    return kv_cache


def unpack_tokens(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `unpack_kv_cache`, both [num_blocks * block_size, num_kv_heads, head_size]."""
    num_blocks, num_kv_heads, block_size, _ = kv_cache.shape
    num_tokens = num_blocks * block_size
    key, value = (
        slot_view.reshape(num_tokens, num_kv_heads, -1) for slot_view in _slot_views(kv_cache)
    )
    return key, value


def unpack_kv_cache(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values of a KV cache, both [num_blocks, num_kv_heads, block_size, head_size]."""
    key, value = (
        tokens.unflatten(0, (len(kv_cache), -1)).transpose(1, 2).contiguous()
        for tokens in unpack_tokens(kv_cache)
    )
    return key, value


def _slot_views(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of K and V in `kv_cache` whose leading dimensions name a slot: each is
    [num_blocks, rows, slots per row, num_kv_heads, *the head_size dims of one token, in order].
    """
    num_blocks, num_kv_heads, block_size, head_size = kv_cache.shape
    head_size //= 2
    unit = 2 if kv_cache.dtype == torch.bfloat16 else 1
    panel = TOKENS_PER_PANEL
    areas = kv_cache.view(num_blocks, num_kv_heads, 2, block_size * head_size)
    key = areas[:, :, 0].view(
        num_blocks, num_kv_heads, block_size // panel, head_size // unit, panel, unit
    )
    value = areas[:, :, 1].view(
        num_blocks, num_kv_heads, head_size // panel, block_size // unit, panel, unit
    )
    return key.permute(0, 2, 4, 1, 3, 5), value.permute(0, 3, 5, 1, 2, 4)


def _gather(
    kv_cache: torch.Tensor, block_ids: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values at `positions` of one request, both float64 [kv, num_kv_heads, head_size]."""
    block_size = kv_cache.shape[2]
    blocks, offsets = block_ids[positions // block_size].long(), positions % block_size
    key, value = (
        slot_view[blocks, offsets // slot_view.shape[2], offsets % slot_view.shape[2]]
        .flatten(2)
        .double()
        for slot_view in _slot_views(kv_cache)
    )
    return key, value
