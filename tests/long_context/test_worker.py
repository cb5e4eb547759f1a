# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm_relay.long_context.host_sequence import HostSequence
from vllm_relay.long_context.orders import ATTRIBUTE, KeptContext, StepOrders
from vllm_relay.long_context.worker import LongContextWorker, LongRequest


class RecordedContexts:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def keep(self, kept: KeptContext, sequence: HostSequence, reused: Any) -> None:
        self.calls.append(f"keep {kept.context_id}")

    def delete(self, context_id: str) -> None:
        self.calls.append(f"delete {context_id}")


def test_a_context_that_is_kept_again_in_the_step_in_which_it_leaves_stays() -> None:
    contexts: Any = RecordedContexts()
    request = LongRequest("a", 100, 1, sequence=HostSequence(0, 101))
    worker = LongContextWorker(requests={"a": request}, contexts=contexts)
    runner = SimpleNamespace(model_runner=None, model_config=SimpleNamespace(max_model_len=512))
    step = SimpleNamespace(
        finished_req_ids={"a"},
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
    )
    orders = StepOrders(kept={"a": KeptContext("x", [1] * 100)}, deleted=["x"])
    setattr(step, ATTRIBUTE, orders)
    worker.begin_step(runner, step)
    assert contexts.calls == ["delete x", "keep x"]
