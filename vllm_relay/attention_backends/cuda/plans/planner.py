# SPDX-License-Identifier: Apache-2.0
"""Plans of steps, made on the host, in a buffer on the device that stays where it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_relay.attention_backends.cuda.config import KernelSetup
from vllm_relay.attention_backends.cuda.copies import upload_into
from vllm_relay.attention_backends.cuda.hidden_bits import HiddenBits, HiddenRun
from vllm_relay.attention_backends.cuda.launch import DevicePlan, Workspace
from vllm_relay.attention_backends.cuda.plans.plan import (
    ENTRY_FIELDS,
    ITEM_FIELDS,
    GpuPlan,
    plan_step,
)
from vllm_relay.attention_backends.forest import Forest


@dataclass(frozen=True)
class PlannerLimits:
    """What the buffers of a planner are made for."""

    max_requests: int
    max_tokens: int
    """Query tokens of a step."""
    max_seq_len: int
    max_hidden: int = 0
    """Different sets of hidden tokens in a step; 0 if query tokens always see all before them."""


class StepPlanner:
    """Makes the work list of a step and keeps it where a captured graph reads it.

    Args:
        shares_workspace: with the other planners of the device that ask for it; for those whose
            layers run one after the other.
    """

    def __init__(
        self,
        limits: PlannerLimits,
        setup: KernelSetup,
        *,
        device: torch.device | str,
        shares_workspace: bool = False,
    ) -> None:
        self.limits, self.setup, self.device = limits, setup, torch.device(device)
        config = setup.config
        requests, tokens = limits.max_requests, limits.max_tokens
        self.hidden: HiddenBits | None = None
        if limits.max_hidden:
            self.hidden = HiddenBits(limits.max_hidden, tokens, limits.max_seq_len, self.device)
        # what requests take alone, uncut, and as much again to cut it or to share
        sections = 1 + limits.max_seq_len // config.section_tokens
        segments = config.section_tokens // config.segment_tokens
        tiles = config.segment_tokens // config.tile_tokens
        self.max_slots = tokens * (sections + segments + 2 * tiles)
        make_workspace = Workspace.shared if shares_workspace else Workspace.allocate
        self.plan = DevicePlan(
            setup,
            make_workspace(self.max_slots, setup, self.device),
            packed=torch.zeros(
                self.most_ints(self.max_slots), dtype=torch.int32, device=self.device
            ),
            seq_lens=torch.zeros(requests, dtype=torch.int32, device=self.device),
            hidden=(self.hidden.bits, self.hidden.row_of_token) if self.hidden else None,
        )
        self.held: GpuPlan | None = None

    def most_ints(self, num_slots: int) -> int:
        """How many numbers a packed plan with so many slots has at most."""
        setup, tokens = self.setup, self.limits.max_tokens
        # of each state, or query token without one: its part of a tile of rows, and a tile begun
        items = (num_slots + tokens) * (1 + setup.group_size / setup.config.small_rows)
        ints = 5 + (tokens + 1) * ENTRY_FIELDS + 2 * setup.num_programs + 1 + num_slots
        return ints + int(items) * (ITEM_FIELDS + setup.num_kv_heads)

    def plan_step(
        self, forest: Forest, query_start_loc: np.ndarray, seq_lens: np.ndarray, **bounds: Any
    ) -> tuple[Forest, GpuPlan]:
        """Plans a step, with `plan.plan_step`, which lists the arguments, as far as there is room.
        The plan serves all steps of these requests that keep to its bounds.

        Raises:
            ValueError: more requests or query tokens than the buffers are made for.
        """
        given = len(seq_lens), int(query_start_loc[-1])
        expected = self.limits.max_requests, self.limits.max_tokens
        if any(one > most for one, most in zip(given, expected, strict=True)):
            raise ValueError(
                f"{given[0]} requests with {given[1]} query tokens in a step, the plan's buffers "
                f"are made for {expected[0]} with {expected[1]}"
            )
        return plan_step(
            forest, query_start_loc, seq_lens, self.setup, max_slots=self.max_slots, **bounds
        )

    def hold(self, plan: GpuPlan) -> None:
        """Has a plan copied to the device, if it is not there; nothing waits for that."""
        if plan is not self.held:
            upload_into(self.plan.packed, plan.packed(self.limits.max_tokens))
            self.held = plan

    def begin_step(self, seq_lens: torch.Tensor, hidden: Sequence[HiddenRun] = ()) -> None:
        """Takes over what differs between steps of one plan.

        Args:
            seq_lens: int32 [requests] on the device; captured graphs keep the tensor.
            hidden: what query tokens do not see of the tokens before them.

        Raises:
            ValueError: more sets of hidden tokens than there is room for.
        """
        self.plan.seq_lens = seq_lens
        if self.hidden is not None:
            self.hidden.update(hidden)
        elif hidden:
            raise ValueError("tokens are hidden, and the planner is made for none: max_hidden")
