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
from vllm_relay.attention_backends.cuda.kernels import groups as triton_groups
from vllm_relay.attention_backends.cuda.kernels import kv_cache as triton_kv_cache
from vllm_relay.attention_backends.cuda.kernels import merge as triton_merge
from vllm_relay.attention_backends.cuda.kernels import plan as triton_plan

INT64_POINTERS = {"bits_ptr", "totals_ptr", "leaders_ptr", "hashes_ptr", "slot_mapping_ptr"}
INT32_POINTERS = {
    "counts_ptr", "large_items_ptr", "small_items_ptr", "table_ptr", "members_ptr", "visible_ptr",
    "token_request_ptr", "token_entry_ptr", "query_start_loc_ptr", "chain_length_ptr", "chains_ptr",
    "ranges_ptr", "bits_row_ptr",
    "seq_lens_ptr", "shareable_ptr", "parents_ptr", "shared_ptr", "group_first_ptr",
    "group_entries_ptr", "group_requests_ptr", "group_children_ptr", "positions_ptr",
    "block_table_ptr", "entries_ptr", "shared_tokens_ptr", "tail_table_ptr", "tail_lens_ptr",
    "entry_table_ptr", "entry_lens_ptr", "states_ptr",
}  # fmt: skip
FLOATS = {"scale", "soft_cap", "token_cost", "state_cost", "start_cost"}


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
    cuts = {"TILE": config.tile_tokens, "SEGMENT": config.segment_tokens}
    rows = {"GROUP": num_heads // num_kv_heads, **cuts, "SECTION": config.section_tokens}
    planner_rows = {**rows, "SMALL": config.small_rows, "LARGE": config.large_rows}
    finish = {"HAS_SINKS": sinks, "HAS_LSE": False}
    blocks = {"GRANULE_BLOCKS": max(1, config.tile_tokens // block_size)}
    kernels: list[tuple[Any, dict[str, Any], dict[str, int]]] = [
        (
            triton_attention.attention_kernel,
            {
                "LARGE_ROWS": config.large_rows,
                "SMALL_ROWS": config.small_rows,
                "GROUP": num_heads // num_kv_heads,
                "BLOCK_SIZE": block_size,
                "HAS_SOFT_CAP": soft_cap,
                "HAS_ALIBI": alibi,
                "HAS_WINDOW": window,
                "HIDES": hides,
                "PRECISION": "ieee" if dtype == "fp32" else "tf32",
                **heads,
                **cuts,
                **finish,
            },
            {"num_warps": config.num_warps, "num_stages": config.num_stages},
        ),
        (
            triton_merge.merge_kernel,
            {"HEADS": 8, "SECTION": config.section_tokens, **heads, **cuts, **finish},
            {"num_warps": 4},
        ),
        (
            triton_kv_cache.write_kernel,
            {"HEAD_SIZE": head_size, "PADDED_HEAD": heads["PADDED_HEAD"], "BLOCK_SIZE": block_size}
            | {"IS_FP8": kv_dtype.startswith("fp8")},
            {"num_warps": 1},
        ),
        (
            triton_groups.publish_kernel,
            {"BLOCK_SIZE": block_size, "CHUNK": 256, "SHARES": True, **blocks},
            {},
        ),
        (triton_groups.follow_kernel, {"CHUNK": 256, **blocks}, {}),
        (triton_groups.group_kernel, {"REQUESTS": 1024, **blocks}, {}),
        (
            triton_plan.decide_kernel,
            {"GRANULE_TOKENS": 64, "REQUESTS": 1024, **blocks, **planner_rows},
            {},
        ),
        (triton_plan.emit_kernel, {"LANES": 64, **planner_rows}, {}),
        (triton_nodes.tables_kernel, {"BLOCK_SIZE": block_size, "LANES": 1024}, {}),
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
