# SPDX-License-Identifier: Apache-2.0
"""Plans of prompts that no stock backend serves: nothing is shared, and no graph captures them.
Prompts are cut into chunks whose states fit into the workspace that decodes have anyway."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_relay.attention_backends.cuda.copies import upload
from vllm_relay.attention_backends.cuda.hidden_bits import HiddenRun, bits_and_rows
from vllm_relay.attention_backends.cuda.launch import DevicePlan
from vllm_relay.attention_backends.cuda.plans.plan import plan_step
from vllm_relay.attention_backends.cuda.plans.planner import StepPlanner
from vllm_relay.attention_backends.forest import Forest


class Chunk(NamedTuple):
    """Query tokens of a step that are computed by one launch."""

    tokens: slice
    plan: DevicePlan
    block_table: torch.Tensor
    """int32 [requests, blocks] on the device."""


def plan_prompts(
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray,
    block_table: torch.Tensor,
    *,
    runs: Sequence[HiddenRun] = (),
    first_request: int = 0,
    planner: StepPlanner,
    window_tokens: int = 0,
) -> list[Chunk]:
    """Every query token from a request of a step on.

    Args:
        query_start_loc: int32 [requests + 1], of the whole step.
        seq_lens: int32 [requests], query tokens included.
        block_table: int32 [requests, blocks] on the device.
        runs: what query tokens of the step hide.
        first_request: those before it are left out.
        planner: whose workspace they use.
        window_tokens: that every layer sees at most, 0 for all.
    """
    chunks = []
    setup, workspace = planner.setup, planner.plan.workspace
    config, max_slots = setup.config, workspace.num_slots
    # folded sections, what is left of the last one, and of one that a window begins in
    more_slots = 2 + (config.section_tokens // config.segment_tokens if window_tokens else 0)
    slots_per_token = np.minimum(seq_lens // config.section_tokens + more_slots, max_slots)
    slots = slots_per_token.repeat(np.diff(query_start_loc))
    end_slots, first_token = slots.cumsum(), int(query_start_loc[0])
    begin, end_of_all = query_start_loc[[first_request, -1]].tolist()
    while begin < end_of_all:
        at = begin - first_token
        end_slot = end_slots[at] - slots[at] + max_slots
        end = first_token + int(np.searchsorted(end_slots, end_slot, side="right"))
        asking = np.flatnonzero((query_start_loc[:-1] < end) & (query_start_loc[1:] > begin))
        first, last = int(asking[0]), int(asking[-1]) + 1
        starts = query_start_loc[first : last + 1].clip(begin, end)
        lens = seq_lens[first:last] - (query_start_loc[first + 1 : last + 1] - starts[1:])
        _, plan = plan_step(
            Forest.none(len(lens)),
            starts - begin,
            lens,
            setup,
            window_tokens=window_tokens,
            max_slots=max_slots,
        )
        own = [
            (max(run_begin, begin) - begin, min(run_end, end) - begin, ranges)
            for run_begin, run_end, ranges in runs
            if run_begin < end and run_end > begin
        ]
        hidden = bits_and_rows(own, end - begin, int(lens.max())) if runs else None
        lens_there = upload(lens, planner.device)
        there = DevicePlan.upload(setup, workspace, plan, lens_there, end - begin, hidden)
        chunks.append(Chunk(slice(begin, end), there, block_table[first:]))
        begin = end
    return chunks
