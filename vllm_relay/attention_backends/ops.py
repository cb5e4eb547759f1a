# SPDX-License-Identifier: Apache-2.0
"""Attention over a paged KV cache in which requests share prefixes: the public functions.

`reference.py` has the same functions in plain float64 torch.

The KV cache is what vLLM allocates for a layer, `[num_blocks, num_kv_heads, block_size,
2 * head_size]`. On CPUs the area of one block and head holds first the keys, then the values, both
packed for vector and tile registers (docs/kernels.md). On GPUs each token has its key and then its
value (docs/cuda-triton.md). The cache may also be float8_e4m3fn.
"""

import math
import os
from typing import Any

import numpy as np
import torch

from vllm_relay.attention_backends.cpu import kernels as cpu
from vllm_relay.attention_backends.forest import Forest
from vllm_relay.attention_backends.hidden_tokens import HiddenTokens
from vllm_relay.attention_backends.plan import plan_step
from vllm_relay.limits import (
    BLOCK_SIZE_MULTIPLE_TOKENS,
    CUDA_BLOCK_SIZE_MULTIPLE_TOKENS,
    HEAD_SIZES,
    KERNELS,
)


def write_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    kernel: str = "auto",
) -> None:
    """Writes the keys and values of new tokens into their slots.

    Args:
        key: [tokens, num_kv_heads, head_size], the dtype of the cache, or, if that is fp8, of the
            queries.
        value: like `key`.
        kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_size].
        slot_mapping: int64 [tokens]; block * block_size + offset, or negative for a token that is
            not to be stored. Tokens of `key` past its end are ignored.
        k_scale, v_scale: what keys and values are divided by in an fp8 cache.
        kernel: as for `relay_attention`.

    Raises:
        ValueError: an argument has the wrong shape, dtype or a slot outside the cache. Slots on a
            GPU are not looked at: that would wait for it.
    """
    on_gpu = _runs_triton(kv_cache, kernel)
    num_blocks, num_kv_heads, block_size, head_size = _check_kv_cache(kv_cache, on_gpu=on_gpu)
    _check_scales(kv_cache, k_scale, v_scale)
    for name, tensor in (("key", key), ("value", value)):
        _check_dtype(name, tensor, _dtypes_beside(kv_cache, on_gpu=on_gpu))
        _check_shape(name, tensor, ("tokens", num_kv_heads, head_size), kv_cache.device)
        _check_packed_heads(name, tensor)
    _check_dtype("slot_mapping", slot_mapping, (torch.int64,))
    _check_shape("slot_mapping", slot_mapping, ("tokens",), kv_cache.device)
    if slot_mapping.shape[0] > min(key.shape[0], value.shape[0]):
        raise ValueError(
            f"slot_mapping: {slot_mapping.shape[0]} slots were given for {key.shape[0]} keys and "
            f"{value.shape[0]} values"
        )
    slot_mapping = slot_mapping.contiguous()
    if on_gpu:
        from vllm_relay.attention_backends.cuda import ops as gpu_ops

        gpu_ops.write_kv_cache(key, value, kv_cache, slot_mapping, k_scale, v_scale)
        return
    if slot_mapping.numel() and int(slot_mapping.max()) >= num_blocks * block_size:
        raise ValueError(
            f"slot_mapping: slot {int(slot_mapping.max())} is outside the cache of "
            f"{num_blocks * block_size} slots"
        )
    cpu.write_kv_cache(key, value, kv_cache, slot_mapping, k_scale, v_scale)


def relay_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    num_kv_heads: int,
    forest: Forest | str | None = "auto",
    sliding_window: int | None = None,
    alibi_slopes: torch.Tensor | list[float] | None = None,
    logits_soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    hidden: HiddenTokens | None = None,
    out: torch.Tensor | None = None,
    kernel: str = "auto",
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of the last tokens of every request over all of its tokens, reading KV
    blocks that several requests share once for all of them.

    The result of a request does not depend on the forest, on the other requests of the batch, on
    its place among them or on the number of threads: it is the same to the last bit.

    Args:
        query: [tokens, heads, head_size]; float32, float16 or bfloat16.
        kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_size], the dtype of `query` or
            fp8, with the keys and values of the query tokens already written.
        block_table: int32 [requests, blocks]; block ids, block 0 is never read as shared.
        query_start_loc: int32 [requests + 1]; request r has the query tokens
            query_start_loc[r] .. query_start_loc[r + 1].
        seq_lens: int32 [requests]; tokens of each request, the query tokens included.
        scale: factor of the scores.
        forest: "auto" finds shared blocks and reads together what pays; None shares nothing; a
            `Forest` is used as it is.
        sliding_window: a query sees this many tokens, itself included; None or 0 for all.
        alibi_slopes: float32 [heads]; adds slope * (kv position - query position) to the scores.
        logits_soft_cap: scores become cap * tanh(scores / cap), before ALiBi.
        sinks: [heads]; one logit per head that takes part in the denominator only.
        hidden: tokens before its query tokens that a request does not see; not with a sliding
            window, and not with ALiBi. On a GPU the host waits for `query_start_loc`.
        out: [tokens, heads, head_size] to write to.
        kernel: "auto", or the name of a kernel (`vllm-relay doctor` lists them); tensors on a GPU
            are served by "triton", which on CPU tensors runs in Triton's interpreter only.
        k_scale, v_scale: factors of the keys and values of an fp8 cache.

    Returns:
        output [tokens, heads, head_size] in the dtype of `query`, and the natural logarithm of
        the softmax denominator, sinks included, float32 [tokens, heads]. A query that sees nothing
        has output 0 and lse -inf. Rows of `query` that no request owns are left as they are in
        `out` (zeros and -inf in what is returned otherwise).

    Raises:
        ValueError: an argument is unusable; the message names it. Of tensors on a GPU shapes and
            dtypes are checked, but not what they hold: that would wait for it.

    Source: RelayAttention (Zhu et al., 2024), section 3, for one prefix; here over a forest, folded
        in token order instead of merged by log-sum-exp.
    """
    on_gpu = _runs_triton(kv_cache, kernel)
    num_blocks, _, block_size, head_size = _check_kv_cache(kv_cache, num_kv_heads, on_gpu=on_gpu)
    _check_scales(kv_cache, k_scale, v_scale)
    _check_dtype("query", query, _dtypes_beside(kv_cache, on_gpu=on_gpu))
    _check_shape("query", query, ("tokens", "heads", head_size), kv_cache.device)
    _check_packed_heads("query", query)
    num_tokens, num_heads, _ = query.shape
    if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"query: {num_heads} heads cannot be shared evenly by num_kv_heads={num_kv_heads}"
        )
    _check_batch_shapes(block_table, query_start_loc, seq_lens, kv_cache.device)
    if forest is not None and forest != "auto" and not isinstance(forest, Forest):
        raise ValueError(f'forest: expected "auto", None or a Forest, got {forest!r}')
    if on_gpu and not scale > 0:
        raise ValueError(f"scale: expected a positive number, got {scale}")
    if sliding_window is not None and sliding_window < 0:
        raise ValueError(f"sliding_window: expected a positive number, got {sliding_window}")
    if logits_soft_cap is not None and not logits_soft_cap >= 0:
        raise ValueError(f"logits_soft_cap: expected a positive number, got {logits_soft_cap}")
    if hidden is not None and (sliding_window or alibi_slopes is not None):
        raise ValueError("hidden: tokens cannot be hidden with sliding_window or alibi_slopes")
    if out is None:
        out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    _check_dtype("out", out, (query.dtype,))
    _check_shape("out", out, tuple(query.shape), kv_cache.device)
    _check_packed_heads("out", out)
    lse = torch.full(
        (num_tokens, num_heads), -torch.inf, dtype=torch.float32, device=kv_cache.device
    )
    alibi_slopes = _per_head("alibi_slopes", alibi_slopes, num_heads, kv_cache.device)
    sinks = _per_head("sinks", sinks, num_heads, kv_cache.device)
    if kv_cache.device.type == "cpu":
        block_table, starts, lens = _check_batch(
            block_table, query_start_loc, seq_lens, num_tokens, num_blocks, block_size
        )
        if hidden is not None:
            hidden.check(lens - np.diff(starts))
    features: dict[str, Any] = {
        "scale": scale,
        "num_kv_heads": num_kv_heads,
        "sliding_window": sliding_window,
        "alibi_slopes": alibi_slopes,
        "logits_soft_cap": logits_soft_cap,
        "sinks": sinks,
        "k_scale": k_scale,
        "v_scale": v_scale,
    }
    if on_gpu:
        from vllm_relay.attention_backends.cuda import ops as gpu_ops

        gpu_ops.relay_attention(
            query,
            kv_cache,
            block_table,
            query_start_loc,
            seq_lens,
            out,
            lse,
            forest=forest,
            hidden=hidden,
            **features,
        )
        return out, lse
    plan = plan_step(
        block_table.numpy(),
        starts,
        lens,
        block_size=block_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        num_threads=torch.get_num_threads(),
        kernel=cpu.kernel_for(query.dtype, kernel),
        forest=forest,
        hidden=hidden,
        is_fp8=kv_cache.dtype == cpu.FP8,
    )
    cpu.relay_attention(query, kv_cache, block_table, plan, out, lse=lse, **features)
    return out, lse


def merge_states(
    output_a: torch.Tensor, lse_a: torch.Tensor, output_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention over the union of two disjoint sets of tokens, from the attention over each.

    Args:
        output_a, output_b: [tokens, heads, head_size].
        lse_a, lse_b: [tokens, heads]; -inf, and +inf as some kernels return it, marks the empty
            state, whose output is ignored.

    Returns:
        output in the dtype of `output_a`, lse float32. Merging two empty states gives the empty
        state, zeros and -inf.

    Raises:
        ValueError: shapes or dtypes do not fit together.

    Source: RelayAttention (Zhu et al., 2024), equations 4 to 6.
    """
    device = output_a.device
    _check_shape("output_a", output_a, ("tokens", "heads", "head_size"), device)
    _check_shape("output_b", output_b, tuple(output_a.shape), device)
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        _check_shape(name, lse, tuple(output_a.shape[:2]), device)
    _check_dtype("output_b", output_b, (output_a.dtype,))
    states = []
    for output, lse in ((output_a, lse_a), (output_b, lse_b)):
        lse = lse.float()
        empty = torch.isinf(lse)
        states.append(
            (
                torch.where(empty[..., None], 0.0, output.float()),
                torch.where(empty, -torch.inf, lse),
            )
        )
    (a, lse_a), (b, lse_b) = states
    largest = torch.maximum(lse_a, lse_b)
    reference = torch.where(torch.isinf(largest), 0.0, largest)
    weight_a, weight_b = (lse_a - reference).exp(), (lse_b - reference).exp()
    total = weight_a + weight_b
    denominator = torch.where(total == 0, 1.0, total)
    output = a * (weight_a / denominator)[..., None] + b * (weight_b / denominator)[..., None]
    return output.to(output_a.dtype), reference + total.log()


def _runs_triton(kv_cache: torch.Tensor, kernel: str) -> bool:
    """Whether the Triton kernels serve a cache: on a GPU, or because they are asked for."""
    if kernel not in ("auto", "triton", *KERNELS, "amx_bf16_emulated"):
        raise ValueError(f"kernel: given {kernel!r}, expected auto, triton or {', '.join(KERNELS)}")
    on_gpu = kv_cache.device.type == "cuda"
    if on_gpu and kernel not in ("auto", "triton"):
        raise ValueError(f'kernel: {kernel!r} is a CPU kernel, expected "triton" for a GPU')
    if not on_gpu and kv_cache.device.type != "cpu":
        raise ValueError(f"kv_cache: expected a CPU or CUDA tensor, got one on {kv_cache.device}")
    if not on_gpu and kernel == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            "kernel: triton serves tensors on a GPU; on CPU tensors it runs in Triton's "
            "interpreter, with TRITON_INTERPRET=1 in the environment before triton is imported"
        )
    return on_gpu or kernel == "triton"


def _check_scales(kv_cache: torch.Tensor, k_scale: float, v_scale: float) -> None:
    is_fp8 = kv_cache.dtype == cpu.FP8
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if not 0 < scale < math.inf or not (is_fp8 or scale == 1):
            wanted = "a positive number" if is_fp8 else f"1 for a cache of {kv_cache.dtype}"
            raise ValueError(f"{name}: given {scale}, expected {wanted}")


def _dtypes_beside(kv_cache: torch.Tensor, *, on_gpu: bool) -> tuple[torch.dtype, ...]:
    """The dtypes that queries, keys and values may have beside a cache."""
    if kv_cache.dtype == cpu.FP8:
        return (torch.float16, torch.bfloat16) if on_gpu else cpu.SUPPORTED_DTYPES
    return (kv_cache.dtype,)


def _check_shape(
    name: str, tensor: torch.Tensor, expected: tuple[int | str, ...], device: torch.device
) -> None:
    fits = tensor.dim() == len(expected) and all(
        isinstance(want, str) or want == got
        for want, got in zip(expected, tensor.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join(str(size) for size in expected)
        raise ValueError(f"{name}: expected shape [{wanted}], got {list(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(f"{name}: expected a tensor on {device}, got one on {tensor.device}")


def _check_dtype(name: str, tensor: torch.Tensor, expected: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in expected:
        wanted = " or ".join(str(dtype) for dtype in expected)
        raise ValueError(f"{name}: expected {wanted}, got {tensor.dtype}")


def _check_packed_heads(name: str, tensor: torch.Tensor) -> None:
    if tensor.numel() and tensor.stride(2) != 1:
        raise ValueError(
            f"{name}: the elements of a head must be contiguous, got strides {tensor.stride()}; "
            "call .contiguous()"
        )


def _check_kv_cache(
    kv_cache: torch.Tensor, num_kv_heads: int | None = None, *, on_gpu: bool = False
) -> tuple[int, int, int, int]:
    _check_dtype("kv_cache", kv_cache, (*cpu.SUPPORTED_DTYPES, cpu.FP8))
    _check_shape(
        "kv_cache",
        kv_cache,
        ("num_blocks", num_kv_heads or "num_kv_heads", "block_size", "2 * head_size"),
        kv_cache.device,
    )
    num_blocks, num_kv_heads, block_size, content = kv_cache.shape
    head_size = content // 2
    if content % 2 or head_size not in HEAD_SIZES:
        raise ValueError(
            f"kv_cache: expected 2 * head_size with head_size in {HEAD_SIZES} as its last "
            f"dimension, got {content}"
        )
    multiple = CUDA_BLOCK_SIZE_MULTIPLE_TOKENS if on_gpu else BLOCK_SIZE_MULTIPLE_TOKENS
    if block_size % multiple or block_size == 0:
        raise ValueError(
            f"kv_cache: expected a block size that is a multiple of {multiple}, got {block_size}"
        )
    if on_gpu:
        if num_blocks and kv_cache.stride(3) != 1:
            raise ValueError(
                "kv_cache: key and value of a token must be contiguous, got strides "
                f"{kv_cache.stride()}"
            )
    elif num_blocks and (kv_cache.stride(3) != 1 or kv_cache.stride(2) != content):
        raise ValueError(
            "kv_cache: the area of one block and head must be contiguous, got strides "
            f"{kv_cache.stride()}"
        )
    return num_blocks, num_kv_heads, block_size, head_size


def _check_batch_shapes(
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    device: torch.device,
) -> None:
    _check_shape("seq_lens", seq_lens, ("requests",), device)
    num_requests = seq_lens.shape[0]
    _check_shape("query_start_loc", query_start_loc, (num_requests + 1,), device)
    _check_shape("block_table", block_table, (num_requests, "blocks"), device)
    _check_dtype("block_table", block_table, (torch.int32,))
    for name, tensor in (("query_start_loc", query_start_loc), ("seq_lens", seq_lens)):
        _check_dtype(name, tensor, (torch.int32, torch.int64))


def _check_batch(
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    num_tokens: int,
    num_blocks: int,
    block_size: int,
) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    num_requests = seq_lens.shape[0]
    starts, lens = query_start_loc.numpy(), seq_lens.numpy()
    query_lens = np.diff(starts)
    if num_requests and (starts[0] < 0 or starts[-1] > num_tokens or (query_lens < 0).any()):
        raise ValueError(
            f"query_start_loc: expected offsets that grow from 0 to at most {num_tokens} (the rows "
            f"of query), got {starts.tolist()}"
        )
    if (query_lens > lens).any():
        worst = int(np.argmax(query_lens - lens))
        raise ValueError(
            f"seq_lens: request {worst} has {int(query_lens[worst])} query tokens but only "
            f"{int(lens[worst])} tokens in all"
        )
    needed = -(-lens // block_size)
    if num_requests and int(needed.max()) > block_table.shape[1]:
        raise ValueError(
            f"block_table: request {int(needed.argmax())} needs {int(needed.max())} blocks, the "
            f"table has {block_table.shape[1]} columns"
        )
    table = block_table.numpy()
    used = np.arange(table.shape[1]) < np.where(query_lens > 0, needed, 0)[:, None]
    outside = used & ((table < 0) | (table >= num_blocks))
    if outside.any():
        request, column = (int(i[0]) for i in np.nonzero(outside))
        raise ValueError(
            f"block_table: block {int(table[request, column])} of request {request} is outside the "
            f"cache of {num_blocks} blocks"
        )
    if block_table.stride(1) != 1:
        block_table = block_table.contiguous()
    return block_table, starts, lens


def _per_head(
    name: str, values: torch.Tensor | list[float] | None, num_heads: int, device: torch.device
) -> torch.Tensor | None:
    if values is None:
        return None
    tensor = torch.as_tensor(values).to(device, torch.float32).contiguous()
    _check_shape(name, tensor, (num_heads,), device)
    return tensor
