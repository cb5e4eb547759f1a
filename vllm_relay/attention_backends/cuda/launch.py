# SPDX-License-Identifier: Apache-2.0
"""The face of the Triton attention kernels: tensors in, launches out.

Callers have checked shapes and dtypes (`ops.py` does, and vLLM's backend by construction). Nothing
here waits for the device. With Triton's interpreter everything runs on CPU tensors.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import triton

from vllm_relay.attention_backends.cuda.config import (
    KernelConfig,
    KernelSetup,
    LayerShape,
    config_for,
)
from vllm_relay.attention_backends.cuda.copies import upload
from vllm_relay.attention_backends.cuda.kernels.attention import attention_kernel
from vllm_relay.attention_backends.cuda.kernels.items import KernelShape
from vllm_relay.attention_backends.cuda.kernels.merge import merge_kernel
from vllm_relay.attention_backends.cuda.plans.plan import GpuPlan

SUPPORTED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MERGE_HEADS = 8
"""Query heads that one program merges."""


def num_multiprocessors(device: torch.device) -> int:
    """Of a GPU; 1 for others, where Triton's interpreter runs."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def setup_for(
    device: torch.device, layer: LayerShape, config: KernelConfig | None = None
) -> KernelSetup:
    """How to launch the kernels on a device: as was measured there, or as ships, or as given."""
    if device.type == "cuda":
        config = config or config_for(
            torch.cuda.get_device_name(device),
            torch.cuda.get_device_capability(device),
            head_size=layer.head_size,
            kv_bytes=layer.kv_bytes,
        )
    config = config or KernelConfig(small_rows=16, large_rows=32)  # Triton's interpreter
    return KernelSetup.of(config, layer, num_multiprocessors(device))


@dataclass(eq=False)
class DevicePlan:
    """A plan where the kernels read it, and what they are launched with."""

    setup: KernelSetup
    workspace: Workspace
    packed: torch.Tensor
    """int32: `GpuPlan.packed`."""
    seq_lens: torch.Tensor
    """int32 [requests]: of the step."""
    hidden: tuple[torch.Tensor, torch.Tensor] | None = None
    """int64 [rows, words] of `bits_of`, and int32 [query tokens] of what each hides, a row or
    `SEES_ALL`; None where no query token ever hides anything."""

    @staticmethod
    def upload(
        setup: KernelSetup,
        workspace: Workspace,
        plan: GpuPlan,
        seq_lens: torch.Tensor,
        num_tokens: int,
        hidden: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> DevicePlan:
        device = seq_lens.device
        packed = upload(plan.packed(num_tokens), device)
        there = None if hidden is None else (upload(hidden[0], device), upload(hidden[1], device))
        return DevicePlan(setup, workspace, packed, seq_lens, there)


class Workspace(NamedTuple):
    """Where states wait to be merged; what it holds before a step does not matter."""

    totals: torch.Tensor
    """float32 [slots, heads]: sums of weights."""
    references: torch.Tensor
    """float32 [slots, heads]: base-2 logarithms of the factors that weights are divided by."""
    outputs: torch.Tensor
    """float32 [slots, heads, head_size]: sums of weights times values."""

    @staticmethod
    def allocate(num_slots: int, setup: KernelSetup, device: torch.device) -> Workspace:
        shape = (max(num_slots, 1), setup.num_heads)
        empty = functools.partial(torch.empty, dtype=torch.float32, device=device)
        return Workspace(empty(shape), empty(shape), empty((*shape, setup.head_size)))

    @staticmethod
    def shared(num_slots: int, setup: KernelSetup, device: torch.device) -> Workspace:
        """One that others have too: layers run one after the other. A larger one takes the place of
        a smaller one, which those keep who have it."""
        key = (str(device), setup.num_heads, setup.head_size)
        found = _shared_workspaces.get(key)
        if found is None or found.num_slots < num_slots:
            found = Workspace.allocate(num_slots, setup, device)
            _shared_workspaces[key] = found
        return found

    @property
    def num_slots(self) -> int:
        return len(self.totals)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self)


_shared_workspaces: dict[tuple[str, int, int], Workspace] = {}


def relay_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    plan: DevicePlan,
    out: torch.Tensor,
    *,
    lse: torch.Tensor | None = None,
    scale: float,
    sliding_window: int | None = None,
    alibi_slopes: torch.Tensor | None = None,
    logits_soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """Runs `plan` for one layer in two launches; writes [tokens, heads, head_size] to `out` and, if
    given, float32 [tokens, heads] to `lse`. How many programs are launched follows from its setup
    and the shape of `query`; `block_table` is the one that was planned for. `alibi_slopes` [heads]
    are float32 and `sinks` [heads] of any type, or None; `k_scale` and `v_scale` are float32
    scalars on the device."""
    num_tokens, num_heads, head_size = query.shape
    setup, config = plan.setup, plan.setup.config
    features = {
        "HAS_SINKS": sinks is not None,
        "HAS_LSE": lse is not None,
        "NUM_HEADS": num_heads,
        "HEAD_SIZE": head_size,
        "PADDED_HEAD": max(16, triton.next_power_of_2(head_size)),
    }
    # kernels look at no tensor that is not there, and get another one
    bits, bits_row = plan.hidden or (plan.packed, plan.packed)
    sinks = query if sinks is None else sinks
    results = (*plan.workspace, out, out if lse is None else lse)
    attention_kernel[(setup.num_programs,)](
        plan.packed, query, kv_cache, k_scale, v_scale, block_table, plan.seq_lens,
        bits, bits_row, query if alibi_slopes is None else alibi_slopes, sinks,
        *results,
        scale, logits_soft_cap or 0.0, sliding_window or 0,
        query.stride(0), query.stride(1), kv_cache.stride(1), block_table.stride(0), bits.stride(0),
        out.stride(0), out.stride(1),
        LARGE_ROWS=config.large_rows,
        SMALL_ROWS=config.small_rows,
        SHAPE=KernelShape(
            **features,
            GROUP=setup.group_size,
            BLOCK_SIZE=kv_cache.shape[2],
            BLOCK_STRIDE=kv_cache.stride(0),
            TOKEN_STRIDE=kv_cache.stride(2),
            TILE=config.tile_tokens,
            SEGMENT=config.segment_tokens,
            HAS_SOFT_CAP=bool(logits_soft_cap),
            HAS_ALIBI=alibi_slopes is not None,
            HAS_WINDOW=bool(sliding_window),
            HIDES=plan.hidden is not None,
            LARGE_STAGES=config.large_stages,
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        ),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip
    merge_kernel[(num_tokens, triton.cdiv(num_heads, MERGE_HEADS))](
        plan.packed, sinks, v_scale,
        *results,
        out.stride(0), out.stride(1),
        HEADS=min(MERGE_HEADS, triton.next_power_of_2(num_heads)),
        num_warps=4,
        **features,
    )  # fmt: skip
