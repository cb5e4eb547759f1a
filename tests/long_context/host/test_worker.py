# SPDX-License-Identifier: Apache-2.0
"""What a worker does with the orders of a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_relay.long_context.host import worker as worker_module
from vllm_relay.long_context.host.worker import LongContextWorker, LongRequest
from vllm_relay.long_context.orders import ORDERS_ATTRIBUTE, KeptContext, StepOrders


class Contexts:
    """Which there are."""

    num_queued = 0

    def __init__(self, *context_ids: str, can_keep: bool = True) -> None:
        self.ids = set(context_ids)
        self.given_up: set[str] = set()
        self._can_keep = can_keep

    def keep(self, kept: KeptContext, sequence: Any, reused: Any) -> bool:
        if self._can_keep:
            self.ids.add(kept.context_id)
        return self._can_keep

    def take_changes(self) -> list[Any]:
        return []

    def delete(self, context_id: str) -> None:
        self.ids.discard(context_id)

    def give_up(self, context_id: str, problem: str) -> None:
        self.given_up.add(context_id)


def step(worker: LongContextWorker, orders: StepOrders, *finished: str) -> None:
    scheduler_output = SimpleNamespace(
        finished_req_ids=set(finished),
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
    )
    setattr(scheduler_output, ORDERS_ATTRIBUTE, orders)
    vllm_worker = SimpleNamespace(
        model_runner=None, model_config=SimpleNamespace(max_model_len=512)
    )
    worker.begin_step(vllm_worker, scheduler_output)


def test_a_context_that_was_evicted_can_be_kept_in_the_same_step() -> None:
    worker = LongContextWorker(contexts=Contexts("a", "b"))
    worker.requests["request"] = LongRequest("request", 60, 1, sequence=SimpleNamespace(begin=0))
    orders = StepOrders(kept={"request": KeptContext("a", [1])}, deleted=["a", "b"])
    step(worker, orders, "request")
    assert worker.contexts.ids == {"a"}
    assert worker.requests == {}


def test_a_dropped_request_lets_go_of_what_it_has_and_of_what_it_reads() -> None:
    worker = LongContextWorker(contexts=Contexts("a"))
    request = LongRequest("request", 60, 1, sequence=SimpleNamespace(begin=50), context=object())
    worker.requests["request"] = worker.readers["request"] = request
    step(worker, StepOrders(dropped=["request"]))
    assert request.sequence is None and request.context is None and worker.readers == {}


@pytest.fixture
def lost_elsewhere(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What another rank has lost, which is not asked unless a request reuses a context."""
    lost: dict[str, str] = {}
    monkeypatch.setattr(worker_module, "lost_in_any_rank", lambda own: own | lost)
    return lost


def request_with(begin: int) -> LongRequest:
    """One whose tokens before `begin` are a stored context's."""
    return LongRequest("request", 60, 1, sequence=SimpleNamespace(begin=begin, layers={}))


def test_the_scheduler_hears_of_what_could_not_be_kept(lost_elsewhere: dict[str, str]) -> None:
    worker = LongContextWorker(contexts=Contexts(can_keep=False))
    worker.requests["request"] = worker.readers["request"] = request_with(50)
    lost_elsewhere["another"] = "b"
    step(worker, StepOrders(kept={"request": KeptContext("a", [1])}), "request")
    assert worker.take_stats().lost == {"request": "a", "another": "b"}
    assert worker.contexts.given_up >= {"b"}
    assert worker.take_stats().lost == {}


@pytest.mark.parametrize("begin", [0, 50])
def test_other_ranks_are_asked_while_a_context_is_reused(
    lost_elsewhere: dict[str, str], begin: int
) -> None:
    worker = LongContextWorker(contexts=Contexts("a"))
    lost_elsewhere["request"] = "a"
    for _ in range(2):
        worker.requests["request"] = request_with(begin)
        if begin:
            worker.readers["request"] = worker.requests["request"]
        step(worker, StepOrders())
        assert worker.take_stats().lost == ({"request": "a"} if begin else {})
    step(worker, StepOrders(), "request")
    assert worker.take_stats().lost == ({"request": "a"} if begin else {})  # could not be kept
    step(worker, StepOrders())
    assert worker.take_stats().lost == {}


def test_a_request_that_loses_its_context_here_is_told_of(lost_elsewhere: dict[str, str]) -> None:
    worker = LongContextWorker(contexts=Contexts("a"))
    worker.requests["request"] = worker.readers["request"] = request_with(50)
    worker.lose(worker.requests["request"], "a", "is damaged")
    lost_elsewhere["another"] = "b"
    step(worker, StepOrders())
    assert worker.take_stats().lost == {"request": "a", "another": "b"}
    assert worker.contexts.given_up >= {"b"}


def test_memory_goes_back_to_the_system_with_those_that_had_it_and_while_prompts_are_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not in steps that only generate: it takes milliseconds."""
    calls: list[None] = []
    monkeypatch.setattr(worker_module, "return_free_memory", lambda: calls.append(None))
    worker = LongContextWorker(contexts=Contexts("a"))
    layer = SimpleNamespace(end=40)
    sequence = SimpleNamespace(begin=0, layers={"layer": layer})
    worker.requests["long"] = LongRequest("long", 60, 1, sequence=sequence)
    worker.requests["short"] = LongRequest("short", 60, 1)
    expected = 0
    for is_returned, orders, finished, end in (
        (True, StepOrders(), [], 40),
        (False, StepOrders(), [], 60),
        (True, StepOrders(deleted=["a"]), [], 61),
        (False, StepOrders(), ["short"], 62),
        (True, StepOrders(), ["long"], 62),
        (False, StepOrders(), [], 62),
    ):
        layer.end = end
        step(worker, orders, *finished)
        expected += is_returned
        assert len(calls) == expected


def test_long_requests_are_those_of_the_batch_that_attention_is_told_of() -> None:
    """Model runner V2 has no batch of its own, and is told of one for each step."""
    worker = LongContextWorker(contexts=Contexts())
    step(worker, StepOrders())
    worker._spec = SimpleNamespace(
        policy=SimpleNamespace(mirrors=lambda lens, prompts: prompts > 9)
    )
    worker.requests = {name: LongRequest(name, size, 1) for name, size in (("a", 4), ("b", 50))}
    lens = np.array([5, 51, 2, 0])
    assert worker.mirrored_requests(lens) == []
    worker.batch = SimpleNamespace(req_ids=["a", "b", "made up"])
    assert worker.mirrored_requests(lens) == [(1, worker.requests["b"])]
    assert worker.mirrored_requests(lens[:1]) == []
    worker.batch = None
    assert worker.mirrored_requests(lens) == []
