# SPDX-License-Identifier: Apache-2.0
"""What a worker does with the orders of a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm_relay.long_context.orders import ATTRIBUTE, KeptContext, StepOrders
from vllm_relay.long_context.worker import LongContextWorker, LongRequest


class Contexts:
    """Which there are."""

    num_queued = 0

    def __init__(self, *context_ids: str, can_keep: bool = True) -> None:
        self.ids = set(context_ids)
        self._can_keep = can_keep

    def keep(self, kept: KeptContext, sequence: Any, reused: Any) -> bool:
        if self._can_keep:
            self.ids.add(kept.context_id)
        return self._can_keep

    def take_changes(self) -> list[Any]:
        return []

    def delete(self, context_id: str) -> None:
        self.ids.discard(context_id)


def step(worker: LongContextWorker, orders: StepOrders, *finished: str) -> None:
    scheduler_output = SimpleNamespace(
        finished_req_ids=set(finished),
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
    )
    setattr(scheduler_output, ATTRIBUTE, orders)
    vllm_worker = SimpleNamespace(
        model_runner=None, model_config=SimpleNamespace(max_model_len=512)
    )
    worker.begin_step(vllm_worker, scheduler_output)


def test_a_context_that_was_evicted_can_be_kept_in_the_same_step() -> None:
    worker = LongContextWorker(contexts=Contexts("a", "b"))
    worker.requests["request"] = LongRequest("request", 60, 1, sequence=SimpleNamespace())
    orders = StepOrders(kept={"request": KeptContext("a", [1])}, deleted=["a", "b"])
    step(worker, orders, "request")
    assert worker.contexts.ids == {"a"}
    assert worker.requests == {}


def test_the_scheduler_hears_of_what_could_not_be_kept() -> None:
    worker = LongContextWorker(contexts=Contexts(can_keep=False))
    worker.requests["request"] = LongRequest("request", 60, 1, sequence=SimpleNamespace())
    step(worker, StepOrders(kept={"request": KeptContext("a", [1])}), "request")
    assert worker.take_stats().lost == {"request": "a"}
    assert worker.take_stats().lost == {}
