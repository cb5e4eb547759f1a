# SPDX-License-Identifier: Apache-2.0
"""What the scheduler tells the workers with a step, and what they count and report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

KEEP_ARG = "relay_keep_context"
"""The key in ``SamplingParams.extra_args`` under which a request asks to become a context."""

ORDERS_ATTRIBUTE = "relay_orders"
"""Of vLLM's SchedulerOutput, a dataclass that is pickled with all its attributes."""


@dataclass(frozen=True)
class Placement:
    """A request that begins, or begins again, with tokens which the host has.

    Attributes:
        num_tokens: that the host has.
        first_resident_token: the device has the tokens from here on, of the last block that
            `num_tokens` begins: a multiple of the block size.
        context_id: of the stored context that they are read from; None: the request itself had
            computed them before it was preempted.
    """

    num_tokens: int
    first_resident_token: int
    context_id: str | None


@dataclass
class StepOrders:
    """
    Attributes:
        placed: by request.
        dropped: preempted requests whose host memory is needed by others.
        kept: requests that have ended and whose tokens become a context.
        deleted: contexts that make room for others.
    """

    placed: dict[str, Placement] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    kept: dict[str, KeptContext] = field(default_factory=dict)
    deleted: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.placed or self.dropped or self.kept or self.deleted)


@dataclass(frozen=True)
class KeptContext:
    """A context that is made of a request: its first `len(tokens)` tokens."""

    context_id: str
    tokens: list[int]


DELETED = "deleted"
"""The state of a context that others continue, and that nothing else reads any more."""


@dataclass(frozen=True)
class ContextReport:
    """What a worker says of a context.

    Attributes:
        state: "indexing" as long as its indexes are built (it is read exactly, or by a scan,
            meanwhile); then "stored" in a file, or "memory" if there is no folder, or with a
            `problem`; `DELETED` is not told to users.
        memory_bytes: of host memory that only it takes; what is mapped from a file is not counted.
        file_bytes: of its file, and of that with its training queries.
        problem: why it could not be stored, if so.
        parent_id: of the context whose first tokens it shares, and does not store itself.
        num_own_tokens: the last ones, which it stores itself.
    """

    context_id: str
    num_tokens: int
    state: str
    memory_bytes: int
    file_bytes: int
    problem: str | None = None
    parent_id: str | None = None
    num_own_tokens: int = 0

    @property
    def is_refused(self) -> bool:
        """Whether there is nothing of it but the reason why."""
        return self.problem is not None and not self.memory_bytes and not self.file_bytes


def asks_to_be_kept(sampling_params: Any) -> bool:
    """Whether a request asks to become a context."""
    return is_asked_for(getattr(sampling_params, "extra_args", None))


def is_asked_for(extra_args: Any) -> bool:
    """Whether `KEEP_ARG` is true, or 1: values of other types mean nothing."""
    return (extra_args or {}).get(KEEP_ARG) == 1  # so is True


def orders_of(scheduler_output: Any) -> StepOrders:
    """Empty ones if there are none."""
    return getattr(scheduler_output, ORDERS_ATTRIBUTE, None) or StepOrders()


LONG_CONTEXTS = "long_contexts"
"""The key of these numbers among the statistics of a step."""

COUNTERS = {
    "host_searches": "Searches for tokens in host memory: one for each step, layer and kv head.",
    "host_searched_tokens": "Tokens in host memory that these searches could have returned.",
    "host_retrieved_tokens": "Tokens that at least one query head of a search got.",
    "host_read_bytes": "Bytes of keys, values and indexes that these searches read.",
    "host_seconds": "Seconds of attention over tokens in host memory.",
    "device_seconds": "Seconds of attention over tokens on the device, in steps that read both.",
    "preempted_kept_tokens": "Tokens that preempted requests did not have to compute again.",
}
GAUGES = {
    "host_dropped_mass": "With max_dropped_mass or max_error, the largest bound of the last step.",
    "host_kv_bytes": "Host memory reserved for keys, values and indexes.",
    "host_kv_limit_bytes": "What may be reserved.",
    "device_kv_bytes": "KV cache that requests and pins hold on the device.",
    "contexts": "Stored contexts.",
    "context_file_bytes": "Bytes of their files.",
    "index_builds_queued": "Contexts whose indexes are being built, or wait for it.",
}


@dataclass
class LongContextStats:
    """What a worker counts in a step.

    Attributes:
        reports: of contexts that have changed.
        lost: requests whose context cannot be read: what they computed in the step is void, or, of
            those that have ended, could not be kept. With the ids of the contexts.
    """

    host_searches: int = 0
    host_searched_tokens: int = 0
    host_retrieved_tokens: int = 0
    host_read_bytes: int = 0
    host_seconds: float = 0.0
    device_seconds: float = 0.0
    host_dropped_mass: float = 0.0
    index_builds_queued: int = 0
    reports: list[ContextReport] = field(default_factory=list)
    lost: dict[str, str] = field(default_factory=dict)

    def merge(self, later: LongContextStats) -> None:
        """Add the statistics of later steps."""
        for name in COUNTERS.keys() & vars(self).keys():
            setattr(self, name, getattr(self, name) + getattr(later, name))
        self.host_dropped_mass = later.host_dropped_mass
        self.index_builds_queued = later.index_builds_queued
        self.reports += later.reports
