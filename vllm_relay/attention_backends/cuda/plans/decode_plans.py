# SPDX-License-Identifier: Apache-2.0
"""The plans of the last steps' decodes: most steps are served by that of one before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_relay.attention_backends.cuda.plans.plan import GpuPlan
from vllm_relay.attention_backends.cuda.plans.planner import StepPlanner
from vllm_relay.attention_backends.cuda.step_batch import StepBatch
from vllm_relay.attention_backends.forest import Forest

RECENT_PLANS = 4
"""That are kept: drafts are planned otherwise than their verification, step by step."""
SPARE_TOKENS = 16
"""Work is planned for requests that are at least so much longer: a plan serves several steps."""


@dataclass(frozen=True, eq=False)
class _Planned:
    """A plan, and the steps it serves."""

    key: tuple[Any, ...]
    found: Forest
    forest: Forest
    """What the plan shares of what was found."""
    plan: GpuPlan
    first_seq_lens: np.ndarray
    last_seq_lens: np.ndarray
    """int32 [requests]"""


class DecodePlans:
    """Has a planner hold the plan of each step.

    Args:
        layer_name: of any layer of the KV cache group.
        min_shared_tokens: shared ranges below this are left alone; None: nothing is shared.
        max_query_len: query tokens of a request in a step, at most.
        window_tokens: that every layer sees at most, 0 for all.
    """

    def __init__(
        self,
        planner: StepPlanner,
        *,
        layer_name: str,
        min_shared_tokens: int | None,
        max_query_len: int = 1,
        window_tokens: int = 0,
    ) -> None:
        self.planner, self.layer_name = planner, layer_name
        self.min_shared_tokens = min_shared_tokens
        self.max_query_len, self.window_tokens = max_query_len, window_tokens
        self._recent: list[_Planned] = []

    def plan(self, batch: StepBatch) -> Forest:
        """Plans a step, if no plan of a step before serves it; returns what is shared."""
        key, lens = batch.key, batch.seq_lens
        alike = [each for each in self._recent if each.key == key]
        alike = [each for each in alike if (each.first_seq_lens <= lens).all()]
        served = (each for each in alike if (lens <= each.last_seq_lens).all())
        if (planned := next(served, None)) is None:
            planned = self._planned(batch, alike[0].found if alike else self._found(batch))
            self._recent = [planned, *self._recent[: RECENT_PLANS - 1]]
        self.planner.hold(planned.plan)
        return planned.forest

    def _found(self, batch: StepBatch) -> Forest:
        setup = self.planner.setup
        if self.min_shared_tokens is None:
            return Forest.none(len(batch.seq_lens))
        return batch.groups(
            self.layer_name,
            batch.query_lens,
            batch.seq_lens - batch.query_lens + 1,
            group_size=setup.group_size,
            cost=setup.cost,
            min_shared_tokens=self.min_shared_tokens,
            max_states=self.planner.max_slots // self.max_query_len,
            coarse_tokens=setup.config.segment_tokens,
        )

    def _planned(self, batch: StepBatch, found: Forest) -> _Planned:
        planner, seq_lens = self.planner, batch.seq_lens
        tile = planner.setup.config.tile_tokens
        last_seq_lens = -(-(seq_lens + SPARE_TOKENS) // tile) * tile
        last_seq_lens = np.minimum(last_seq_lens, planner.limits.max_seq_len)
        last_seq_lens = np.maximum(last_seq_lens, seq_lens)
        forest, plan = planner.plan_step(
            found,
            batch.query_start_loc,
            last_seq_lens,
            least_seq_lens=seq_lens - (self.max_query_len - 1),  # if no draft is right
            window_tokens=self.window_tokens,
        )
        return _Planned(batch.key, found, forest, plan, seq_lens.copy(), last_seq_lens)
