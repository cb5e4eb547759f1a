# SPDX-License-Identifier: Apache-2.0
"""The public functions on GPU tensors; `ops.py` has their descriptions and calls them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vllm_relay.attention_backends.cuda import launch as cuda
from vllm_relay.attention_backends.cuda.config import LayerShape
from vllm_relay.attention_backends.cuda.copies import upload
from vllm_relay.attention_backends.cuda.hidden_bits import HiddenRun, bits_and_rows
from vllm_relay.attention_backends.cuda.kernels import kv_cache as triton_kv_cache
from vllm_relay.attention_backends.cuda.plans.plan import plan_step
from vllm_relay.attention_backends.forest import Forest
from vllm_relay.attention_backends.groups import forest_for
from vllm_relay.attention_backends.hidden_tokens import HiddenTokens


def write_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: float,
    v_scale: float,
) -> None:
    """See `triton_kv_cache.write_kv_cache`."""
    k_scale_there, v_scale_there = _on_device(k_scale, v_scale, kv_cache.device)
    triton_kv_cache.write_kv_cache(key, value, kv_cache, slot_mapping, k_scale_there, v_scale_there)


def _on_device(k_scale: float, v_scale: float, device: torch.device) -> list[torch.Tensor]:
    """Without waiting for the device, as a copy would."""
    return [
        torch.full((), scale, dtype=torch.float32, device=device) for scale in (k_scale, v_scale)
    ]


def relay_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    num_kv_heads: int,
    forest: Forest | str | None,
    sliding_window: int | None,
    hidden: HiddenTokens | None,
    k_scale: float,
    v_scale: float,
    **features: Any,
) -> None:
    """Plans and runs one layer. Plans are made on the host, which waits for the device."""
    num_tokens, num_heads, head_size = query.shape
    if num_tokens == 0 or len(seq_lens) == 0:
        return
    device, block_size = query.device, kv_cache.shape[2]
    block_table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
    starts = query_start_loc.to(torch.int32).cpu().numpy()
    lens = seq_lens.to(torch.int32).cpu().numpy()
    layer = LayerShape(num_heads, num_kv_heads, head_size, kv_cache.dtype.itemsize)
    setup = cuda.setup_for(device, layer)
    kept = forest_for(
        forest,
        block_table.cpu().numpy(),
        np.diff(starts),
        lens,
        block_size=block_size,
        group_size=setup.group_size,
        cost=setup.cost,
    )
    runs: list[HiddenRun] = []
    if hidden is not None:
        hidden.check(lens - np.diff(starts))
        runs = hidden.query_runs(starts)
    _, plan = plan_step(kept, starts, lens, setup, window_tokens=sliding_window or 0)
    k_scale_there, v_scale_there = _on_device(k_scale, v_scale, device)
    cuda.relay_attention(
        query,
        kv_cache,
        block_table,
        cuda.DevicePlan.upload(
            setup,
            cuda.Workspace.allocate(plan.num_slots, setup, device),
            plan,
            upload(lens, device),
            num_tokens,
            bits_and_rows(runs, num_tokens, int(lens.max())) if runs else None,
        ),
        out,
        lse=lse,
        sliding_window=sliding_window,
        k_scale=k_scale_there,
        v_scale=v_scale_there,
        **features,
    )
