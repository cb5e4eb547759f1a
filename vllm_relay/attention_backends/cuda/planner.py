# SPDX-License-Identifier: Apache-2.0
"""Plans of steps made on the device, in buffers that stay where they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton

from vllm_relay.attention_backends.cuda import plan as gpu_plan
from vllm_relay.attention_backends.cuda.config import KernelConfig
from vllm_relay.attention_backends.cuda.hidden_bits import HiddenBits, HiddenRun
from vllm_relay.attention_backends.cuda.kernels import counts as triton_counts
from vllm_relay.attention_backends.cuda.kernels import groups as triton_groups
from vllm_relay.attention_backends.cuda.kernels import plan as triton_plan
from vllm_relay.attention_backends.cuda.launch import PlanTensors, Workspace, relay_attention

EMIT_LANES = 64


@dataclass(frozen=True)
class PlannerLimits:
    """What the buffers of a planner are made for."""

    max_requests: int
    max_tokens: int
    """Query tokens of a step."""
    max_query_len: int
    """Query tokens of one request; requests with more are left out of the plan."""
    max_seq_len: int
    num_blocks: int
    """Of the KV cache: block ids are smaller."""
    max_hidden: int = 0
    """Different sets of hidden tokens in a step; 0 if query tokens always see all before them."""


class DevicePlanner:
    """Finds what the requests of a step share and writes the work list, without the host.

    Args:
        block_size: tokens per KV block.
        num_programs: programs of the attention kernel; work is cut finer where they would idle.
        shares_workspace: with the other planners of the device that ask for it; for those whose
            layers run one after the other.
        kv_dtype: of the KV cache.
    """

    def __init__(
        self,
        limits: PlannerLimits,
        config: KernelConfig,
        *,
        block_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        kv_dtype: torch.dtype,
        num_programs: int,
        device: torch.device | str,
        shares_workspace: bool = False,
    ) -> None:
        self.limits = limits
        self.config = config = config.for_head_size(head_size, max(2, kv_dtype.itemsize))
        self.num_programs = num_programs
        self.group_size = num_heads // num_kv_heads
        self.num_kv_heads = num_kv_heads
        self.granule_tokens = math.lcm(block_size, config.tile_tokens)
        self.block_size = block_size
        self.token_cost = float(2 * head_size * kv_dtype.itemsize)
        self.state_cost = float(2 * 4 * (head_size + 2)) * config.state_cost
        requests, tokens = limits.max_requests, limits.max_tokens

        def int32(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.hidden: HiddenBits | None = None
        if limits.max_hidden:
            self.hidden = HiddenBits(
                limits.max_hidden, tokens, limits.max_seq_len, torch.device(device)
            )
        max_granules = max(1, limits.max_seq_len // self.granule_tokens)
        # a range has pieces up to the first section, one per section, and what is left of a segment
        sections = 1 + limits.max_seq_len // config.section_tokens
        segments = config.section_tokens // config.segment_tokens
        pieces = segments + sections + 2
        entries = tokens * (1 + gpu_plan.MAX_DEPTH)
        tiles = 2 * requests + entries * self.group_size // config.small_rows
        self.max_items = pieces * tiles
        tiles_of_segment = config.segment_tokens // config.tile_tokens
        self.max_slots = tokens * (sections + segments + 2 * tiles_of_segment)
        self.max_members = entries
        self.plan = PlanTensors(
            counts=int32(triton_counts.NUM_COUNTS),
            large_items=int32(self.max_items, gpu_plan.ITEM_FIELDS),
            small_items=int32(self.max_items, gpu_plan.ITEM_FIELDS),
            members=int32(entries),
            visible=int32(tokens),
            token_request=int32(tokens),
            token_entry=int32(tokens),
            chain_length=int32(requests),
            chains=int32(requests, gpu_plan.MAX_DEPTH + 1, 2),
            ranges=int32(2 * requests, gpu_plan.RANGE_FIELDS),
            hidden_bits=self.hidden.bits if self.hidden else None,
            hidden_row=self.hidden.row_of_token if self.hidden else None,
        )
        self.plan.counts[triton_counts.EPOCH.value] = 1
        self.plan.members[:tokens] = torch.arange(tokens, dtype=torch.int32, device=device)
        self.totals = torch.zeros(triton_counts.NUM_TOTALS, dtype=torch.int64, device=device)
        self.leaders = torch.zeros(limits.num_blocks, dtype=torch.int64, device=device)
        self.hashes = torch.zeros((requests, max_granules), dtype=torch.int64, device=device)
        self.shareable, self.parents, self.shared = (int32(requests) for _ in range(3))
        self.group_first, self.group_entries = int32(requests), int32(requests)
        self.group_requests, self.group_children = int32(requests), int32(requests)
        self.positions = int32(requests, requests)
        make_workspace = Workspace.shared if shares_workspace else Workspace.allocate
        self.workspace = make_workspace(self.max_slots, num_heads, head_size, torch.device(device))

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        out: torch.Tensor,
        plan: PlanTensors | None = None,
        **arguments: Any,
    ) -> None:
        """Runs the plan of the last `update`, or one of another's that fits the workspace, for one
        layer: `cuda.relay_attention`, which lists the arguments. `block_table` is the one that was
        planned for."""
        relay_attention(
            query,
            kv_cache,
            block_table,
            plan or self.plan,
            self.workspace,
            out,
            config=self.config,
            num_programs=self.num_programs,
            num_kv_heads=self.num_kv_heads,
            **arguments,
        )

    def update(
        self,
        block_table: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        max_query_len: int,
        window_tokens: int = 0,
        min_shared_tokens: int = 0,
        shares: bool = True,
        everything: bool = False,
        is_counted: bool = True,
        hidden: Sequence[HiddenRun] = (),
    ) -> PlanTensors:
        """Launches the planning of a step; the same buffers hold every plan.

        Args:
            block_table: int32 [requests, blocks] on the device; 0 is the null block.
            query_start_loc: int32 [requests + 1] on the device.
            seq_lens: int32 [requests] on the device, query tokens included.
            max_query_len: an upper bound.
            window_tokens: that every layer sees at most, 0 for all.
            shares: whether anything may be shared.
            everything: share also what does not pay.
            is_counted: add the step to `totals`.
            hidden: what query tokens do not see of the tokens before them.

        Raises:
            ValueError: more requests, or sets of hidden tokens, than the buffers are made for.
        """
        num_requests = seq_lens.shape[0]
        if num_requests > self.limits.max_requests:
            raise ValueError(
                f"{num_requests} requests in a step, the plan's buffers are made for "
                f"{self.limits.max_requests}"
            )
        if self.hidden is not None:
            self.hidden.update(hidden)
        elif hidden:
            raise ValueError("tokens are hidden, and the planner is made for none: max_hidden")
        if num_requests == 0:
            self.plan.counts[: triton_counts.EPOCH.value].zero_()
            self.plan.token_request.fill_(-1)
            return self.plan
        plan, config = self.plan, self.config
        requests = triton.next_power_of_2(self.limits.max_requests)
        granule_blocks = self.granule_tokens // self.block_size
        row_sizes = {
            "GROUP": self.group_size,
            "SMALL": config.small_rows,
            "LARGE": config.large_rows,
            "TILE": config.tile_tokens,
            "SEGMENT": config.segment_tokens,
            "SECTION": config.section_tokens,
        }
        max_query = self.limits.max_query_len
        chunk = min(256, triton.next_power_of_2(self.hashes.shape[1]))
        batch = (block_table, query_start_loc, seq_lens)
        prefixes = (self.leaders, self.hashes, self.shareable)
        strides = (block_table.stride(0), self.hashes.stride(0))
        triton_groups.publish_kernel[(num_requests,)](
            plan.counts,
            *batch,
            *prefixes,
            plan.visible,
            plan.token_request,
            plan.token_entry,
            num_requests,
            self.limits.num_blocks,
            self.limits.max_tokens,
            max_query,
            *strides,
            BLOCK_SIZE=self.block_size,
            GRANULE_BLOCKS=granule_blocks,
            CHUNK=chunk,
            SHARES=shares,
        )
        triton_groups.follow_kernel[(num_requests,)](
            plan.counts,
            block_table,
            *prefixes,
            self.parents,
            self.shared,
            self.limits.num_blocks,
            *strides,
            GRANULE_BLOCKS=granule_blocks,
            CHUNK=chunk,
        )
        triton_groups.group_kernel[(num_requests,)](
            plan.counts,
            *batch,
            *prefixes,
            self.parents,
            self.shared,
            plan.members,
            self.group_first,
            self.group_entries,
            self.group_requests,
            self.group_children,
            self.positions,
            num_requests,
            self.limits.num_blocks,
            self.limits.max_tokens,
            self.max_members - self.limits.max_tokens,
            min(max_query_len, max_query),
            *strides,
            self.positions.stride(0),
            GRANULE_BLOCKS=granule_blocks,
            REQUESTS=requests,
        )
        triton_plan.decide_kernel[(num_requests,)](
            plan.counts,
            *batch,
            *prefixes,
            self.parents,
            self.shared,
            self.group_entries,
            self.group_requests,
            self.group_children,
            self.positions,
            plan.chain_length,
            plan.chains,
            plan.ranges,
            num_requests,
            self.limits.num_blocks,
            max_query,
            window_tokens,
            min_shared_tokens,
            self.token_cost,
            0.0 if everything else self.state_cost,
            0.0 if everything else self.token_cost * config.start_tokens,
            *strides,
            self.positions.stride(0),
            GRANULE_BLOCKS=granule_blocks,
            GRANULE_TOKENS=self.granule_tokens,
            REQUESTS=requests,
            **row_sizes,
        )
        triton_plan.emit_kernel[(2 * num_requests,)](
            plan.counts,
            self.totals,
            query_start_loc,
            seq_lens,
            self.parents,
            self.group_first,
            self.group_entries,
            plan.chain_length,
            plan.chains,
            plan.ranges,
            plan.token_request,
            plan.large_items,
            plan.small_items,
            num_requests,
            max_query,
            window_tokens,
            self.max_items,
            self.max_slots,
            self.num_kv_heads,
            self.num_programs,
            int(is_counted),
            LANES=EMIT_LANES,
            **row_sizes,
        )
        return plan
