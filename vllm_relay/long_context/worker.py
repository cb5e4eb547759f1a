# SPDX-License-Identifier: Apache-2.0
"""What a worker knows of the requests of a step, and the host's part of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_relay.long_context.host_sequence import HostSequence
from vllm_relay.long_context.orders import Placement, StepOrders, orders_of
from vllm_relay.long_context.window import Residency, WindowPolicy


@dataclass
class LongRequest:
    """A request, as far as its tokens may leave the device.

    Attributes:
        first_resident_token: the tokens before it were never on the device.
        sequence: in host memory; None as long as all tokens are on the device.
        placement: where it began, in the step in which it begins.
    """

    num_prompt_tokens: int
    max_tokens: int
    first_resident_token: int = 0
    sequence: HostSequence | None = None
    placement: Placement | None = None


@dataclass
class MirroredRow:
    """A request of a step, whose new keys and values are copied to the host.

    Attributes:
        first_query, last_query: its rows in the query.
        num_computed_tokens: before the step.
        residency: what the device holds of it.
        fill_from: the tokens from here to `num_computed_tokens` are the host's, and have to be
            brought to their block on the device; None: there are none.
        blocks: int32; its row of the block table, before it was compacted.
    """

    sequence: HostSequence
    first_query: int
    last_query: int
    num_computed_tokens: int
    residency: Residency
    fill_from: int | None
    blocks: Any


@dataclass
class LongContextWorker:
    """The requests of one worker process."""

    requests: dict[str, LongRequest] = field(default_factory=dict)
    max_model_len: int = 0
    _runner: Any = None

    def begin_step(self, worker: Any, scheduler_output: Any) -> None:
        """Takes over what the scheduler says of the step: its requests, and those that ended."""
        self._runner = worker.model_runner
        self.max_model_len = worker.model_config.max_model_len
        orders = orders_of(scheduler_output)
        for request_id in scheduler_output.finished_req_ids:
            self.requests.pop(request_id, None)
        for request_id in orders.dropped:
            if request_id in self.requests:
                self.requests[request_id].sequence = None
        for new in scheduler_output.scheduled_new_reqs:
            if new.req_id not in self.requests:
                max_tokens = getattr(new.sampling_params, "max_tokens", None)
                self.requests[new.req_id] = LongRequest(
                    num_prompt_tokens=_num_prompt_tokens(new),
                    max_tokens=self.max_model_len if max_tokens is None else max_tokens,
                )
            self._place(new.req_id, orders)
        for request_id in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            self._place(request_id, orders)

    def _place(self, request_id: str, orders: StepOrders) -> None:
        """The request begins, or begins again after it was preempted."""
        request, placement = self.requests[request_id], orders.placed.get(request_id)
        request.placement = placement
        request.first_resident_token = 0
        if placement is not None:
            request.first_resident_token = placement.first_resident_token

    def rows(self, num_requests: int) -> Sequence[LongRequest | None]:
        """The requests of the running step in the order of its block table; none in a dummy run."""
        if self._runner is None:
            return [None] * num_requests
        ids = self._runner.input_batch.req_ids[:num_requests]
        return [self.requests.get(each) for each in ids]

    def mirrored(
        self,
        request: LongRequest,
        policy: WindowPolicy,
        num_computed_tokens: int,
        num_new_tokens: int,
    ) -> HostSequence | None:
        """Where the tokens of a step are copied to, if they are."""
        end = num_computed_tokens + num_new_tokens
        if not policy.mirrors(end, request.num_prompt_tokens):
            return None
        if request.sequence is None:
            capacity = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
            request.sequence = HostSequence(0, max(capacity, end))
        return request.sequence


def _num_prompt_tokens(new_request: Any) -> int:
    if new_request.prompt_token_ids is not None:
        return len(new_request.prompt_token_ids)
    return new_request.prompt_embeds.shape[0]


state = LongContextWorker()
