# SPDX-License-Identifier: Apache-2.0
"""The face of the C++ attention kernels: tensors in, addresses and strides out.

Callers have checked shapes and dtypes (`ops.py` does, and vLLM's backend by construction).
"""

import numpy as np
import torch

from vllm_relay import _C
from vllm_relay.attention_backends.cpu.work_items import SEGMENT_TOKENS
from vllm_relay.attention_backends.plan import StepPlan
from vllm_relay.limits import KERNELS

if SEGMENT_TOKENS != _C.SEGMENT_TOKENS:
    raise ImportError(
        f"vllm_relay._C was built for segments of {_C.SEGMENT_TOKENS} tokens, this version of "
        f"vllm_relay plans for {SEGMENT_TOKENS}: rebuild it (pip install --force-reinstall)"
    )

DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
SUPPORTED_DTYPES = tuple(DTYPE_CODES)
FP8 = torch.float8_e4m3fn
"""What a KV cache may hold instead of the dtype of the queries, packed as that is."""


def kernel_for(dtype: torch.dtype, wanted: str = "auto") -> str:
    """The kernel that serves `dtype` on this machine.

    Args:
        wanted: "auto" for the fastest, or a kernel's name.

    Raises:
        ValueError: if there is no such kernel in this build, or not for this machine or dtype.
    """
    if dtype not in DTYPE_CODES:
        raise ValueError(f"dtype {dtype} is not supported: use one of {SUPPORTED_DTYPES}")
    usable = usable_kernels(dtype)
    if wanted == "auto":
        return usable[0]
    if wanted not in usable:
        raise ValueError(
            f"kernel {wanted!r} cannot serve {dtype} here: usable are "
            f"{', '.join(name for name in KERNELS if name in usable)} (compiled: "
            f"{', '.join(name for name in KERNELS if name in _C.compiled_kernels())})"
        )
    return wanted


def usable_kernels(dtype: torch.dtype) -> list[str]:
    """The kernels that serve `dtype` on this machine, in the order in which "auto" prefers them."""
    return [
        name for name in _C.supported_kernels() if dtype == torch.bfloat16 or "bf16" not in name
    ]


def relay_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    plan: StepPlan,
    out: torch.Tensor,
    *,
    lse: torch.Tensor | None = None,
    scale: float,
    num_kv_heads: int,
    sliding_window: int | None = None,
    alibi_slopes: torch.Tensor | None = None,
    logits_soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Runs `plan` for one layer; writes [tokens, heads, head_size] to `out` and, if given, float32
    [tokens, heads] to `lse`. `alibi_slopes` and `sinks` are float32 [heads] or None; `k_scale` and
    `v_scale` are factors of the keys and values of `kv_cache`, 1 unless it is fp8."""
    if plan.native is None:
        plan.native = _native_plan(plan)
    _C.attention(
        plan.kernel,
        plan.native,
        DTYPE_CODES[query.dtype],
        query.shape[1],
        num_kv_heads,
        query.shape[2],
        kv_cache.shape[2],
        query.data_ptr(),
        query.stride(0),
        query.stride(1),
        kv_cache.data_ptr(),
        kv_cache.dtype == FP8,
        v_scale,
        kv_cache.stride(0),
        kv_cache.stride(1),
        block_table.data_ptr(),
        block_table.stride(0),
        out.data_ptr(),
        out.stride(0),
        out.stride(1),
        0 if lse is None else lse.data_ptr(),
        scale * k_scale,
        logits_soft_cap or 0.0,
        sliding_window or 0,
        0 if alibi_slopes is None else alibi_slopes.data_ptr(),
        0 if sinks is None else sinks.data_ptr(),
    )


def _native_plan(plan: StepPlan) -> "_C.Plan":
    work = plan.work
    tables = {
        "entries": plan.entries,
        "spans": work.spans,
        "row_blocks": work.row_blocks,
        "items": work.items,
        "divisions": work.divisions,
        "score_items": work.score_items,
        "weight_items": work.weight_items,
        "value_items": work.value_items,
        "merges": work.merges,
    }
    return _C.Plan(
        {name: np.ascontiguousarray(table, np.int32) for name, table in tables.items()},
        plan.max_block_entries,
        work.num_partial_entries,
        work.num_scores,
        plan.num_threads,
        plan.heads_first,
        plan.hides_tokens,
    )


def write_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Packs key and value [tokens, num_kv_heads, head_size] into the slots of `slot_mapping`,
    int64 [tokens] with negative entries for tokens to leave out; an fp8 cache holds them divided
    by `k_scale` and `v_scale`, and at most 448."""
    _C.write_kv_cache(
        DTYPE_CODES[key.dtype],
        slot_mapping.shape[0],
        key.shape[1],
        key.shape[2],
        kv_cache.shape[2],
        torch.get_num_threads(),
        key.data_ptr(),
        key.stride(0),
        key.stride(1),
        value.data_ptr(),
        value.stride(0),
        value.stride(1),
        kv_cache.data_ptr(),
        kv_cache.dtype == FP8,
        k_scale,
        v_scale,
        kv_cache.stride(0),
        kv_cache.stride(1),
        slot_mapping.data_ptr(),
    )
