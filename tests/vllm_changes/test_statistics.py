# SPDX-License-Identifier: Apache-2.0
"""How the statistics of a step leave the worker."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu_worker import Worker

from vllm_relay.attention_backends.groups import PlanStats
from vllm_relay.attention_backends.step_stats import recorder
from vllm_relay.vllm_changes.statistics import attach_to_worker_output


class Later(AsyncModelRunnerOutput):
    def __init__(self, output: ModelRunnerOutput) -> None:
        self.output = output

    def get_output(self) -> ModelRunnerOutput:
        return self.output

    def get_kv_connector_output(self) -> None:  # from vLLM 0.33 on
        return None


@pytest.mark.parametrize("is_async", [False, True], ids=["now", "later"])
def test_statistics_travel_with_the_output_of_their_step(
    monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    outputs = [ModelRunnerOutput(req_ids=[str(n)], req_id_to_index={str(n): 0}) for n in range(2)]
    queue = list(outputs)

    def execute_model(self: Any, step: int) -> None:
        recorder.add_plan(PlanStats(requests=step + 1))

    def sample_tokens(self: Any) -> Any:
        return Later(queue.pop(0)) if is_async else queue.pop(0)

    monkeypatch.setattr(Worker, "execute_model", execute_model)
    monkeypatch.setattr(Worker, "sample_tokens", sample_tokens)
    attach_to_worker_output(recorder)
    worker = object.__new__(Worker)
    results = []
    for step in range(2):
        assert Worker.execute_model(worker, step) is None
        results.append(Worker.sample_tokens(worker))
    if is_async:
        results = [result.get_output() for result in results]
    assert results == outputs
    assert [result.relay_stats.request_steps for result in results] == [1, 2]
