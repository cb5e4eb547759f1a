# SPDX-License-Identifier: Apache-2.0
"""Compiles the Triton kernels for a GPU that need not be there, to see that they compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_relay.attention_backends.cuda.config import KernelConfig
from vllm_relay.attention_backends.cuda.flash import kernels as triton_nodes
from vllm_relay.attention_backends.cuda.kernels import attention as triton_attention
from vllm_relay.attention_backends.cuda.kernels import kv_cache as triton_kv_cache
from vllm_relay.attention_backends.cuda.kernels import merge as triton_merge
from vllm_relay.attention_backends.cuda.kernels.items import KernelShape

INT64_POINTERS = {"bits_ptr", "slot_mapping_ptr"}
INT32_POINTERS = {
    "plan_ptr", "table_ptr", "bits_row_ptr", "seq_lens_ptr", "block_table_ptr",
    "entries_ptr", "shared_tokens_ptr", "tail_table_ptr", "tail_lens_ptr",
    "entry_table_ptr", "entry_lens_ptr", "states_ptr", "rows_ptr", "num_rows_ptr",
}  # fmt: skip
FLOATS = {"scale", "soft_cap"}


def signature_of(
    kernel: Any, constants: dict[str, Any], dtype: str, kv_dtype: str
) -> tuple[dict[str, str], dict[tuple[int, ...], list[list[object]]]]:
    """Triton's signature and attributes, for aligned pointers and strides."""
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in INT32_POINTERS:
            signature[name] = "*i32"
        elif name in INT64_POINTERS:
            signature[name] = "*i64"
        elif name in ("query_ptr", "out_ptr", "key_ptr", "value_ptr", "entry_out_ptr"):
            signature[name] = f"*{dtype}"
        elif name == "kv_ptr":
            signature[name] = f"*{kv_dtype}"
        elif name.endswith("_ptr"):
            signature[name] = "*fp32"
        else:
            signature[name] = "fp32" if name in FLOATS else "i32"
    aligned: dict[tuple[int, ...], list[list[object]]] = {
        (index,): [["tt.divisibility", 16]]
        for index, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or "stride" in name
    }
    return signature, aligned


def variants(
    config: KernelConfig,
    *,
    dtype: str = "bf16",
    kv_dtype: str | None = None,
    head_size: int = 128,
    num_heads: int = 32,
    num_kv_heads: int = 8,
    block_size: int = 16,
    soft_cap: bool = False,
    alibi: bool = False,
    window: bool = False,
    sinks: bool = False,
    hides: bool = False,
) -> Iterator[tuple[str, Callable[[int], Any]]]:
    """Every kernel by name, as a function that compiles it for a compute capability: 80 for sm_80.
    Dtypes are Triton's names: bf16, fp16, fp32, fp8e4nv."""
    config = config.for_head_size(head_size, 4 if dtype == "fp32" else 2)
    kv_dtype = kv_dtype or dtype
    heads = {
        "NUM_HEADS": num_heads,
        "HEAD_SIZE": head_size,
        "PADDED_HEAD": triton.next_power_of_2(head_size),
    }
    finish = {"HAS_SINKS": sinks, "HAS_LSE": False}
    kernels: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
        (
            triton_attention.attention_kernel,
            {
                "LARGE_ROWS": config.large_rows,
                "SMALL_ROWS": config.small_rows,
                "SHAPE": KernelShape(
                    GROUP=num_heads // num_kv_heads,
                    BLOCK_SIZE=block_size,
                    BLOCK_STRIDE=num_kv_heads * block_size * 2 * head_size,
                    TOKEN_STRIDE=2 * head_size,
                    HAS_SOFT_CAP=soft_cap,
                    HAS_ALIBI=alibi,
                    HAS_WINDOW=window,
                    HIDES=hides,
                    LARGE_STAGES=config.large_stages,
                    PRECISION="ieee" if dtype == "fp32" else "tf32",
                    TILE=config.tile_tokens,
                    SEGMENT=config.segment_tokens,
                    **heads,
                    **finish,
                ),
            },
            {"num_warps": config.num_warps, "num_stages": config.num_stages},
        ),
        (
            triton_merge.merge_kernel,
            {"HEADS": 8, **heads, **finish},
            {"num_warps": 4},
        ),
        (
            triton_kv_cache.write_kernel,
            {"HEAD_SIZE": head_size, "PADDED_HEAD": heads["PADDED_HEAD"], "BLOCK_SIZE": block_size}
            | {"IS_FP8": kv_dtype.startswith("fp8")},
            {"num_warps": 1},
        ),
        (triton_nodes.tables_kernel, {"BLOCK_SIZE": block_size, "LANES": 1024}, {}),
        (triton_nodes.gather_rows_kernel, {"NUMBERS": num_heads * head_size, "LANES": 1024}, {}),
        (
            triton_nodes.merge_nodes_kernel,
            {"HEADS": 8, "MAX_STATES": 8, "HAS_SINKS": finish["HAS_SINKS"], **heads},
            {},
        ),
    ]
    for kernel, constants, options in kernels:
        signature, aligned = signature_of(kernel, constants, dtype, kv_dtype)
        source = ASTSource(kernel, signature, constants, aligned)

        def compile_for(capability: int, source: Any = source, options: Any = options) -> Any:
            return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)

        yield kernel.fn.__name__, compile_for
