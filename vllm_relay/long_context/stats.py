# SPDX-License-Identifier: Apache-2.0
"""Counters of long contexts, and their Prometheus names."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_relay.long_context.orders import ContextReport

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
