# SPDX-License-Identifier: Apache-2.0
"""What plans made on the device have shared, on its way to the host."""

from __future__ import annotations

import torch

from vllm_relay.attention_backends.cuda.kernels import counts as triton_counts
from vllm_relay.attention_backends.cuda.planner import DevicePlanner
from vllm_relay.attention_backends.groups import PlanStats


class TotalsReader:
    """Reads what a planner has counted without waiting: a copy is asked for now and then, and read
    when it has arrived."""

    def __init__(self, planner: DevicePlanner, every_steps: int) -> None:
        self._planner = planner
        self._every_steps = every_steps
        self._steps = 0
        self._seen = [0] * triton_counts.NUM_TOTALS
        on_device = planner.totals.device.type == "cuda"
        self._host = torch.zeros(triton_counts.NUM_TOTALS, dtype=torch.int64, pin_memory=on_device)
        self._event = torch.cuda.Event() if on_device else None
        self._is_copying = False

    def step(self) -> PlanStats | None:
        """To be called once a step: what the steps since the last answer have counted, summed up,
        with groups and depth of the last; or None."""
        stats = None
        if self._is_copying and (self._event is None or self._event.query()):
            self._is_copying = False
            totals = self._host.tolist()
            new = [now - seen for now, seen in zip(totals, self._seen, strict=True)]
            self._seen = totals
            stats = PlanStats(
                steps=new[triton_counts.TOTAL_STEPS],
                requests=new[triton_counts.TOTAL_REQUESTS],
                requests_shared=new[triton_counts.TOTAL_SHARING],
                kv_tokens_logical=new[triton_counts.TOTAL_TOKENS],
                kv_tokens_read=new[triton_counts.TOTAL_TOKENS]
                - new[triton_counts.TOTAL_TOKENS_SAVED],
                groups=totals[triton_counts.LAST_GROUPS],
                forest_depth=totals[triton_counts.LAST_DEPTH],
            )
        self._steps += 1
        if self._steps % self._every_steps == 1 % self._every_steps and not self._is_copying:
            self._host.copy_(self._planner.totals, non_blocking=True)
            if self._event is not None:
                self._event.record()
            self._is_copying = True
        return stats
