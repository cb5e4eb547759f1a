# SPDX-License-Identifier: Apache-2.0
"""What a worker does differently for requests with modules: positions, and what tokens see."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vllm_relay.attention_backends.hidden_tokens import HiddenTokens, Ranges
from vllm_relay.prefix_cache.modules.plan import ModulePlan, plan_of


@dataclass
class ModularRequest:
    """A request of a worker.

    Attributes:
        runs: first slot, end and hidden slots of what it computes; the last one goes on.
    """

    plan: ModulePlan
    runs: list[tuple[int, int, Ranges]]

    @classmethod
    def of(cls, plan: ModulePlan) -> ModularRequest:
        runs = [(a, b, plan.hidden_slots(visible)) for a, b, visible in plan.computed_runs()]
        first, _, hidden = runs[-1]
        return cls(plan, [*runs[:-1], (first, sys.maxsize, hidden)])


@dataclass
class StepRows:
    """Runs of query tokens that see the same, as if each were a request.

    Attributes:
        requests: int64 [rows]; the request of each, or None if all are as they were.
        query_start_loc, seq_lens: as the step has them, for these rows.
    """

    requests: np.ndarray | None
    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    hidden: HiddenTokens


@dataclass
class ModuleWorker:
    """The requests with modules of one worker process."""

    requests: dict[str, ModularRequest] = field(default_factory=dict)
    _runner: Any = None

    def begin_step(self, worker: Any, scheduler_output: Any) -> None:
        """Takes over which requests begin and have ended."""
        self._runner = worker.model_runner
        for request_id in scheduler_output.finished_req_ids:
            self.requests.pop(request_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            plan = plan_of(new.sampling_params)
            if plan is not None:
                self.requests[new.req_id] = ModularRequest.of(plan)

    def move_positions(self, runner: Any, num_scheduled_tokens: np.ndarray) -> None:
        """Give the tokens of a step the positions of their plans; slots have been found by then."""
        if not self.requests:
            return
        batch = runner.input_batch
        ends = np.cumsum(num_scheduled_tokens)
        for row, request_id in enumerate(batch.req_ids[: len(ends)]):
            request = self.requests.get(request_id)
            if request is None:
                continue
            count = int(num_scheduled_tokens[row])
            begin = int(batch.num_computed_tokens_cpu[row]) - request.plan.num_stored_slots
            positions = torch.tensor(request.plan.positions_from(begin, count))
            runner.positions[int(ends[row]) - count : int(ends[row])].copy_(positions)

    def rows_of_step(self, query_start_loc: np.ndarray, seq_lens: np.ndarray) -> StepRows | None:
        """How the query tokens of the running step see their tokens; None: as always.

        Args:
            query_start_loc: int32 [requests + 1].
            seq_lens: int32 [requests], the tokens of the step included.
        """
        if not self.requests or self._runner is None:
            return None
        request_ids = self._runner.input_batch.req_ids[: len(seq_lens)]
        found = [self.requests.get(request_id) for request_id in request_ids]
        if not any(found):
            return None
        owners: list[int] = []
        starts: list[int] = [0]
        lens: list[int] = []
        ranges: dict[int, Ranges] = {}
        for number, request in enumerate(found):
            seq_len, query_end = int(seq_lens[number]), int(query_start_loc[number + 1])
            first_slot = seq_len - (query_end - int(query_start_loc[number]))
            runs = [(first_slot, seq_len, ())] if request is None else request.runs
            for begin, end, hidden in runs:
                if begin < seq_len and end > first_slot:
                    if hidden:
                        ranges[len(owners)] = hidden
                    owners.append(number)
                    lens.append(min(end, seq_len))
                    starts.append(query_end - (seq_len - lens[-1]))
        requests = None if len(owners) == len(found) else np.array(owners)
        return StepRows(
            requests,
            np.array(starts, query_start_loc.dtype),
            np.array(lens, seq_lens.dtype),
            HiddenTokens(ranges),
        )


state = ModuleWorker()
