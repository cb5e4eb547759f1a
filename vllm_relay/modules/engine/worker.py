# SPDX-License-Identifier: Apache-2.0
"""What a worker does differently for requests with modules: positions, and what tokens see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_relay.attention_backends.hidden_tokens import HiddenTokens, Ranges
from vllm_relay.attention_backends.step_rows import StepRows
from vllm_relay.modules.engine.requests import unsupported_reason
from vllm_relay.modules.prompt.plan import ModulePlan, plan_of
from vllm_relay.vllm_changes.worker.positions import (
    call_after_inputs,
    give_positions_to_model,
    gives_positions,
)
from vllm_relay.vllm_changes.worker.steps import call_around_attention, call_before_each_step


@dataclass
class ModuleWorker:
    """The requests with modules of one worker process."""

    requests: dict[str, ModulePlan] = field(default_factory=dict)  # that run, by their ids
    batch: Any = None
    """Names the requests of the running step in `req_ids`: model runner V1's own, or V2's."""

    def begin_step(self, worker: Any, scheduler_output: Any) -> None:
        """Takes over which requests begin and have ended. A RuntimeError says that one has modules,
        and its model takes its positions from elsewhere."""
        self.batch = getattr(worker.model_runner, "input_batch", None)
        for request_id in scheduler_output.finished_req_ids:
            self.requests.pop(request_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            plan = plan_of(new.sampling_params)
            if plan is None:
                continue
            if self.batch is None and not gives_positions(worker.model_runner):
                name = type(worker.model_runner.model_state).__name__
                raise RuntimeError(
                    f"prompt modules: {name} gives the model positions of its own; "
                    "VLLM_USE_V2_MODEL_RUNNER=0"
                )
            self.requests[new.req_id] = plan

    def begin_batch(self, batch: Any) -> None:
        """Takes over who is where in a step of model runner V2."""
        self.batch = batch

    def move_positions(self, runner: Any, num_scheduled_tokens: np.ndarray) -> None:
        """Give the tokens of a step the positions of their plans; slots have been found by then."""
        self.batch = runner.input_batch
        self._move(
            runner.input_batch.num_computed_tokens_cpu, num_scheduled_tokens, runner.positions
        )

    def move_batch_positions(self, batch: Any, positions: torch.Tensor) -> None:
        """The same for a batch of model runner V2; `positions` are int64 [tokens]."""
        self.batch = batch
        self._move(batch.num_computed_tokens_np, batch.num_scheduled_tokens, positions)

    def _move(
        self, num_computed_tokens: Any, num_scheduled_tokens: np.ndarray, positions: torch.Tensor
    ) -> None:
        if not self.requests:
            return
        ends = np.cumsum(num_scheduled_tokens).tolist()
        places: list[int] = []
        moved: list[int] = []
        for row, request_id in enumerate(self.batch.req_ids[: len(ends)]):
            plan = self.requests.get(request_id)
            if plan is None:
                continue
            count = int(num_scheduled_tokens[row])
            begin = int(num_computed_tokens[row]) - plan.num_stored_slots
            places += range(ends[row] - count, ends[row])
            moved += plan.positions_from(begin, count)
        if places:
            there = async_tensor_h2d([places, moved], positions.device, torch.int64)
            positions.index_copy_(0, there[0], there[1])

    def rows_of_step(self, query_start_loc: np.ndarray, seq_lens: np.ndarray) -> StepRows | None:
        """How the query tokens of the running step see their tokens; None: as always.

        Args:
            query_start_loc: int32 [requests + 1].
            seq_lens: int32 [requests], the tokens of the step included.
        """
        if not self.requests or self.batch is None:
            return None
        request_ids = self.batch.req_ids[: len(seq_lens)]
        found = [self.requests.get(request_id) for request_id in request_ids]
        if not any(found):
            return None
        owners: list[int] = []
        starts: list[int] = [0]
        lens: list[int] = []
        ranges: dict[int, Ranges] = {}
        for number, plan in enumerate(found):
            seq_len, query_end = int(seq_lens[number]), int(query_start_loc[number + 1])
            first_slot = seq_len - (query_end - int(query_start_loc[number]))
            for end, hidden in _runs(plan, first_slot, seq_len):
                if hidden:
                    ranges[len(owners)] = hidden
                owners.append(number)
                lens.append(end)
                starts.append(query_end - (seq_len - end))
        requests = None if len(owners) == len(found) else np.array(owners)
        return StepRows(
            requests,
            np.array(starts, query_start_loc.dtype),
            np.array(lens, seq_lens.dtype),
            HiddenTokens(ranges),
        )


def _runs(plan: ModulePlan | None, begin: int, end: int) -> Iterator[tuple[int, Ranges]]:
    """Ends and hidden slots of the runs that a request computes between two slots."""
    if plan is None:
        yield end, ()
    elif begin >= plan.run_slots[-2]:  # the last one goes on
        yield end, plan.last_hidden_slots
    else:
        for first, run_end, visible in plan.computed_runs(begin):
            if first >= end:
                return
            is_last = run_end == plan.run_slots[-1]
            yield end if is_last else min(run_end, end), plan.hidden_slots(visible)


state = ModuleWorker()


def set_up(vllm_config: VllmConfig) -> ModuleWorker | None:
    """Follow the plans of requests, if those of this engine may have any."""
    if unsupported_reason(vllm_config) is not None:
        return None
    call_before_each_step("modules", state.begin_step)
    if vllm_config.use_v2_model_runner:
        call_around_attention("modules", state.begin_batch)
        give_positions_to_model(state.move_batch_positions)
    else:
        call_after_inputs(state.move_positions)
    return state
