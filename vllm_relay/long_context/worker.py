# SPDX-License-Identifier: Apache-2.0
"""What a worker knows of the requests of a step, and the host's part of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_relay.long_context.host_sequence import HostSequence
from vllm_relay.long_context.window import Residency, WindowPolicy


@dataclass
class LongRequest:
    """A request, as far as its tokens may leave the device.

    Attributes:
        first_resident_token: the tokens before it were never on the device.
        sequence: in host memory; None as long as all tokens are on the device.
    """

    num_prompt_tokens: int
    max_tokens: int
    first_resident_token: int = 0
    sequence: HostSequence | None = None


@dataclass
class MirroredRow:
    """A request of a step, whose new keys and values are copied to the host.

    Attributes:
        first_query, last_query: its rows in the query.
        num_computed_tokens: before the step.
        residency: what the device holds of it.
        blocks: int32; its row of the block table, before it was compacted.
    """

    sequence: HostSequence
    first_query: int
    last_query: int
    num_computed_tokens: int
    residency: Residency
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
        for request_id in scheduler_output.finished_req_ids:
            self.requests.pop(request_id, None)
        resident = getattr(scheduler_output, "relay_first_resident_tokens", {})
        for new in scheduler_output.scheduled_new_reqs:
            if new.req_id not in self.requests:  # else it was preempted
                max_tokens = getattr(new.sampling_params, "max_tokens", None)
                self.requests[new.req_id] = LongRequest(
                    num_prompt_tokens=_num_prompt_tokens(new),
                    max_tokens=self.max_model_len if max_tokens is None else max_tokens,
                )
        for request_id in scheduler_output.num_scheduled_tokens:
            if request_id in resident and request_id in self.requests:
                self.requests[request_id].first_resident_token = resident[request_id]

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
