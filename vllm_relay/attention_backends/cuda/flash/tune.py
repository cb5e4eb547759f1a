# SPDX-License-Identifier: Apache-2.0
"""FlashAttention over nodes beside the Triton kernels on this GPU: which is faster, and whether
both compute what FlashAttention alone does."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_relay.attention_backends.cuda.copies import upload
from vllm_relay.attention_backends.cuda.flash.attention import (
    FlashAttention,
    NodeBuffers,
    NodeShapes,
)
from vllm_relay.attention_backends.cuda.flash.nodes import (
    FLASH_COST,
    NodeBatch,
    NodeLimits,
    NodeSetup,
    node_batch,
)
from vllm_relay.attention_backends.cuda.launch import num_multiprocessors
from vllm_relay.attention_backends.cuda.plans.planner import StepPlanner
from vllm_relay.attention_backends.cuda.tune import Bench, Load
from vllm_relay.attention_backends.groups import find_groups

ROUNDINGS = 8
"""By so many of the largest output results may differ: weights and parts of outputs are rounded."""


@dataclass(frozen=True)
class Compared:
    """Microseconds of one layer on a batch."""

    load: Load
    flash_us: float
    triton_us: float
    stock_us: float
    """FlashAttention that shares nothing."""


def compare(
    bench: Bench, planner: StepPlanner, flash_attention: FlashAttention, **options: Any
) -> list[Compared]:
    """Times both on every batch.

    Args:
        options: passed on to FlashAttention.

    Raises:
        ValueError: one of them computes something else than FlashAttention alone.
    """
    found = []
    for load in bench.loads:
        runs = {
            "flash": prepare(bench, load, flash_attention, shares=True, **options),
            "triton": bench.attend(planner, load),
            "stock": prepare(bench, load, flash_attention, shares=False, **options),
        }
        outs = {}
        for name, run in runs.items():
            run()
            outs[name] = bench.out.float()
        bound = ROUNDINGS * torch.finfo(bench.shape.dtype).eps * float(outs["stock"].abs().max())
        for name in ("flash", "triton"):
            error = float((outs[name] - outs["stock"]).abs().max())
            if not error <= bound:
                raise ValueError(
                    f"{name} differs from FlashAttention by {error:.2g} on {load}, expected at "
                    f"most {bound:.2g}: use --attention-backend FLASH_ATTN, and report it"
                )
        found.append(Compared(load, **{f"{name}_us": bench.time_us(runs[name]) for name in runs}))
    return found


def faster_of(compared: list[Compared]) -> str:
    """ "flash" or "triton", by the geometric mean of their times."""
    flash, triton = (
        statistics.geometric_mean(getattr(each, f"{name}_us") for each in compared)
        for name in ("flash", "triton")
    )
    return "triton" if triton < flash else "flash"


def nodes_of(
    block_table: np.ndarray,
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray,
    *,
    block_size: int,
    num_heads: int,
    num_kv_heads: int,
    device: torch.device,
    shares: bool = True,
    piece_tokens: int | None = None,
) -> tuple[NodeBuffers, NodeBatch]:
    """What the backend would plan for decodes, and buffers that hold it.

    Args:
        block_table: int32 [requests, blocks].
        query_start_loc: int32 [requests + 1].
        seq_lens: int32 [requests].
        shares: or each reads its own.
        piece_tokens: into which nodes are cut; None: as the backend would.
    """
    requests, group_size = len(seq_lens), num_heads // num_kv_heads
    limits = NodeLimits(requests, requests, requests)
    setup = NodeSetup(block_size, group_size, num_kv_heads, num_multiprocessors(device))
    forest = find_groups(
        block_table,
        np.diff(query_start_loc) * shares,
        seq_lens - 1,
        block_size=block_size,
        group_size=group_size,
        cost=FLASH_COST,
    )
    _, nodes = node_batch(forest, query_start_loc, setup, limits, piece_tokens)
    buffers = NodeBuffers(limits, setup, max_blocks=block_table.shape[1], device=device)
    buffers.upload(nodes, requests)
    return buffers, nodes


def prepare(
    bench: Bench, load: Load, flash_attention: FlashAttention, *, shares: bool, **options: Any
) -> Callable[[], None]:
    """Plans a batch, and returns what runs its attention into `bench.out`."""
    table, query_start_loc, seq_lens = bench.batch(load)
    shape, requests = bench.shape, load.requests
    buffers, nodes = nodes_of(
        table,
        query_start_loc,
        seq_lens,
        block_size=shape.block_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        device=bench.device,
        shares=shares,
    )
    shapes = NodeShapes.of(nodes)
    buffers.write_tables(
        upload(table, bench.device), upload(seq_lens, bench.device), shapes.num_entries
    )
    key, value = bench.kv_cache.transpose(1, 2).split(shape.head_size, dim=-1)
    query, starts = bench.query[:requests], upload(query_start_loc, bench.device)
    out = torch.empty_like(query)

    def run() -> None:
        bench.out = out
        buffers.attend(
            flash_attention,
            query,
            key,
            value,
            out,
            shapes,
            query_start_loc=starts,
            tails={"max_seqlen_q": 1, "max_seqlen_k": int(seq_lens.max())},
            softmax_scale=shape.head_size**-0.5,
            **options,
        )

    return run
