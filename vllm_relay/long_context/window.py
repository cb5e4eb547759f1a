# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a request the device holds, and which the host.

Scheduler and worker never tell each other: both go by this file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm_relay.config.long_contexts import PrefillMode


class Residency(NamedTuple):
    """The device holds the tokens [0, sink_end) and [window_begin, ...); the host answers for
    those between. Both are multiples of the block size."""

    sink_end: int
    window_begin: int

    @property
    def num_host_tokens(self) -> int:
        return self.window_begin - self.sink_end


@dataclass(frozen=True)
class WindowPolicy:
    """When tokens leave the device.

    Attributes:
        block_size_tokens: of the KV cache.
        sink_tokens, window_tokens: first and last tokens that stay, rounded up to whole blocks.
        min_context_tokens: as long as fewer tokens than this are computed, all stay.
        prefill: "exact_resident" frees nothing before the whole prompt is computed.
    """

    block_size_tokens: int
    sink_tokens: int
    window_tokens: int
    min_context_tokens: int
    prefill: PrefillMode

    @property
    def sink_end(self) -> int:
        """In tokens: `sink_tokens`, rounded up to whole blocks."""
        return -(-self.sink_tokens // self.block_size_tokens) * self.block_size_tokens

    def residency(
        self, num_computed_tokens: int, num_prompt_tokens: int, first_resident_token: int = 0
    ) -> Residency:
        """What a step holds that begins when `num_computed_tokens` are computed.

        Args:
            num_computed_tokens: of the request, before the step.
            num_prompt_tokens: of the request.
            first_resident_token: the tokens before it were never on the device: they belong to a
                stored context, or were computed before the request was preempted. A multiple of
                the block size.
        """
        size = self.block_size_tokens
        sink_end = 0 if first_resident_token else self.sink_end
        if not self.frees(num_computed_tokens, num_prompt_tokens):
            return Residency(0, first_resident_token)
        window_begin = max(0, num_computed_tokens - self.window_tokens) // size * size
        window_begin = max(window_begin, first_resident_token)
        if window_begin <= sink_end:
            return Residency(0, first_resident_token)
        return Residency(sink_end, window_begin)

    def frees(self, num_computed_tokens: int, num_prompt_tokens: int) -> bool:
        """Whether a request of which so much is computed leaves tokens to the host."""
        if num_computed_tokens < self.min_context_tokens:
            return False
        return self.prefill == "exact_offload" or num_computed_tokens >= num_prompt_tokens

    def mirrors(self, num_computed_tokens: Any, num_prompt_tokens: Any) -> Any:
        """Whether the host has a copy of all tokens once so many are computed: before any of them
        can leave the device, and so that nothing is lost when the request is preempted.

        Args:
            num_computed_tokens, num_prompt_tokens: int, or arrays of as many requests.

        Returns:
            bool, or a bool array.
        """
        least = self.min_context_tokens
        return (num_computed_tokens >= least) | (num_prompt_tokens >= least)

    def max_blocks(self, max_model_len_tokens: int, max_in_flight_tokens: int) -> int:
        """The most blocks one request holds.

        Args:
            max_in_flight_tokens: scheduled, and not known to be computed yet.
        """
        size = self.block_size_tokens
        whole = -(-max_model_len_tokens // size)
        if self.prefill == "exact_resident":
            return whole
        dense = -(-(self.min_context_tokens + max_in_flight_tokens) // size)
        # the window begins in the middle of a block, and so does what is in flight
        window = self.sink_end // size + -(-(self.window_tokens + max_in_flight_tokens) // size) + 1
        return min(whole, max(dense, window))
