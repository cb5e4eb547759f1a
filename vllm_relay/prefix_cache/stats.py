# SPDX-License-Identifier: Apache-2.0
"""What the prefix cache saved: counters of a step, and the prefixes that were used most."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from hashlib import sha256
from math import prod
from typing import Any

from vllm_relay.modules.prompt.plan import plan_of_request

PREFIX_CACHE = "prefix_cache"
"""The key of these statistics in the dict ``relay`` of SchedulerStats."""

EVICTED_BLOCKS = "evicted_blocks"
EVICTION_REASONS = ("unused", "needed")
EVICTED_BLOCKS_TEXT = "Cached KV blocks that were evicted, by reason."
TENANTS = "tenants"
TENANT_COUNTERS = {
    "tenant_query_tokens": "Tokens of admitted requests, by adapter and cache salt.",
    "tenant_hit_tokens": "Of these, tokens found in the prefix cache.",
}
MAX_TENANTS = 100
OTHER_TENANTS = "other"

TOP_PREFIXES = 10

_SCHEDULING_EVERY_S = 1.0


def _counter(text: str, zero: Any = 0) -> Any:
    return field(default=zero, metadata={"counter": text})


def _gauge(text: str) -> Any:
    return field(default=0, metadata={"gauge": text})


@dataclass
class PrefixCacheStats:
    """Counters since the last ones, and gauges as they are now, with what Prometheus is told."""

    prefix_query_tokens: int = _counter(
        "Tokens of admitted requests, looked up in the prefix cache."
    )
    prefix_hit_tokens: int = _counter("Of these, tokens found there.")
    tokens_saved: int = _counter("Tokens found there, those of resumed requests included.")
    overtakes: int = _counter("Requests that ran while an older one of their priority waited.")
    module_hits: int = _counter("Prompt modules that admitted requests found computed.")
    module_hit_tokens: int = _counter("Tokens of these modules.")
    module_encodings: int = _counter("Prompt modules that were computed.")
    module_encoded_bytes: int = _counter("Bytes of KV cache that this filled, padding included.")
    scheduling_steps: int = _counter("Steps that were scheduled.")
    scheduling_seconds: float = _counter("Seconds that this took.", 0.0)
    tenants: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Query and hit tokens by tenant."""
    evicted_blocks: dict[str, int] = field(default_factory=dict)
    pinned_blocks: int = _gauge("KV blocks that pinned prompts hold.")
    pinned_bytes: int = _gauge("Bytes of KV cache in these blocks.")
    held_requests: int = _gauge("Waiting requests held until another has computed their prefix.")
    leading_requests: int = _gauge("Running requests for which others are held.")
    blocked_requests: int = _gauge(
        "Waiting requests without grammar, module or place for their adapter."
    )
    overtaken_requests: int = _gauge(
        "Waiting requests after which came one that has run before them."
    )

    def merge(self, later: PrefixCacheStats) -> None:
        """Add later statistics."""
        for name in COUNTERS:
            setattr(self, name, getattr(self, name) + getattr(later, name))
        for name in GAUGES:
            setattr(self, name, getattr(later, name))
        for tenant, (query_tokens, hit_tokens) in later.tenants.items():
            self.add_tenant(tenant, query_tokens, hit_tokens)
        for reason, blocks in later.evicted_blocks.items():
            self.evicted_blocks[reason] = self.evicted_blocks.get(reason, 0) + blocks

    def add_tenant(self, tenant: str, query_tokens: int, hit_tokens: int) -> None:
        query, hit = self.tenants.get(tenant, (0, 0))
        self.tenants[tenant] = query + query_tokens, hit + hit_tokens

    def __str__(self) -> str:
        rate = self.prefix_hit_tokens / self.prefix_query_tokens if self.prefix_query_tokens else 0
        evicted = ", ".join(
            f"{blocks} {reason}" for reason, blocks in sorted(self.evicted_blocks.items())
        )
        return (
            f"prefix cache: {self.prefix_hit_tokens} of {self.prefix_query_tokens} tokens hit "
            f"({rate:.1%}), blocks evicted: {evicted or 'none'}; {self.pinned_blocks} blocks "
            f"({self.pinned_bytes / 2**20:.1f} MiB) pinned, {self.held_requests} requests held, "
            f"{self.overtakes} overtakes"
        )


def _texts(kind: str) -> dict[str, str]:
    told = fields(PrefixCacheStats)
    return {each.name: each.metadata[kind] for each in told if kind in each.metadata}


COUNTERS, GAUGES = _texts("counter"), _texts("gauge")
"""What Prometheus is told of each."""


class TopPrefixes:
    """The prefixes with most hit tokens: up to `capacity`, with fewest dropped first."""

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._used: dict[bytes, tuple[int, int]] = {}  # tokens and hits

    def add_hit(self, block_hash: bytes, tokens: int) -> None:
        """Count a request that found the ``tokens`` tokens up to this chained hash cached."""
        _, hits = self._used.get(block_hash, (0, 0))
        self._used[block_hash] = tokens, hits + 1
        if len(self._used) > self._capacity:
            self._used = {key: self._used[key] for key in self._most_used(self._capacity // 2)}

    def top(self, count: int = TOP_PREFIXES) -> list[dict[str, Any]]:
        """The first ``count`` prefixes: id (8 hex digits of the hash), tokens, hits."""
        return [
            {"id": key.hex()[:8], "tokens": self._used[key][0], "hits": self._used[key][1]}
            for key in self._most_used(count)
        ]

    def _most_used(self, count: int) -> list[bytes]:
        return sorted(self._used, key=lambda key: prod(self._used[key]), reverse=True)[:count]


class PrefixCacheRecorder:
    """Collects the statistics of a RelayScheduler in the engine core."""

    def __init__(self, scheduler: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._step = PrefixCacheStats()
        self._last_gauges = self.gauges()
        self._overtakes = 0
        self._evicted: dict[str, int] = {}
        self._tenants: set[str] = set()
        self._scheduling_taken_s = clock()
        self.top_prefixes = TopPrefixes()

    def on_admitted(self, request: Any, hit_tokens: int) -> None:
        """Count a request whose first ``hit_tokens`` tokens were found in the prefix cache."""
        plan = plan_of_request(request)
        if plan is not None and plan.encodes:
            return  # nobody has asked for it
        num_hidden = 0 if plan is None else plan.num_hidden_slots
        self._step.tokens_saved += hit_tokens - num_hidden
        if request.num_preemptions > 0:
            return  # it finds what it computed itself
        self._step.prefix_query_tokens += request.num_tokens - num_hidden
        self._step.prefix_hit_tokens += hit_tokens - num_hidden
        self._step.add_tenant(
            self._tenant(request), request.num_tokens - num_hidden, hit_tokens - num_hidden
        )
        hash_block_size = self._scheduler.kv_cache_manager.block_pool.hash_block_size
        if plan is not None:
            self._step.module_hits += len(plan.segments)
            self._step.module_hit_tokens += sum(each.num_tokens for each in plan.segments)
            for segment, end in zip(plan.segments, plan.first_slots[1:], strict=True):
                last_block = request.block_hashes[end // hash_block_size - 1]
                self.top_prefixes.add_hit(last_block, segment.num_tokens)
        elif depth := hit_tokens // hash_block_size:
            self.top_prefixes.add_hit(request.block_hashes[depth - 1], hit_tokens)

    def on_module_computed(self, num_bytes: int) -> None:
        """Count a module whose keys and values take this many bytes."""
        self._step.module_encodings += 1
        self._step.module_encoded_bytes += num_bytes

    def on_scheduled(self, seconds: float) -> None:
        """Count a step that took so long to schedule."""
        self._step.scheduling_steps += 1
        self._step.scheduling_seconds += seconds

    def take(self) -> PrefixCacheStats | None:
        """The statistics since the last call; None if there is nothing new."""
        step = self._step
        overtakes = self._scheduler.waiting.overtakes
        evicted = self._scheduler.kv_cache_manager.block_pool.free_block_queue.evicted_blocks
        step.overtakes = overtakes - self._overtakes
        step.evicted_blocks = dict(Counter(evicted) - Counter(self._evicted))
        gauges = self.gauges()
        now_s = self._clock()
        # what every step has is no reason to send something with every step
        is_new = replace(step, scheduling_steps=0, scheduling_seconds=0.0) != PrefixCacheStats()
        is_due = step.scheduling_steps and now_s - self._scheduling_taken_s >= _SCHEDULING_EVERY_S
        if not is_new and not is_due and gauges == self._last_gauges:
            return None
        self._step = PrefixCacheStats()
        self._overtakes, self._evicted = overtakes, dict(evicted)
        self._last_gauges, self._scheduling_taken_s = gauges, now_s
        for name, value in gauges.items():
            setattr(step, name, value)
        return step

    def text_of(self, stats: PrefixCacheStats) -> str:
        """For a log, with the prefixes that were used most."""
        most_used = ", ".join(
            f"{prefix['id']} ({prefix['tokens']} tokens, {prefix['hits']} hits)"
            for prefix in self.top_prefixes.top()
        )
        return f"{stats}; most used prefixes: {most_used or 'none'}"

    def gauges(self) -> dict[str, int]:
        """As they are now."""
        pins, waiting = self._scheduler.pins, self._scheduler.waiting
        return {
            "pinned_blocks": pins.num_blocks,
            "pinned_bytes": pins.num_bytes,
            "held_requests": waiting.held_requests,
            "leading_requests": waiting.leading_requests,
            "blocked_requests": waiting.blocked_requests,
            "overtaken_requests": self._scheduler.overtaken.count,
        }

    def _tenant(self, request: Any) -> str:
        """The adapter and the cache salt of a request; a salt may be a secret, and is hashed."""
        adapter, salt = request.lora_request, request.cache_salt
        parts = [] if adapter is None else [f"lora:{adapter.lora_name}"]
        if salt is not None:
            parts.append(f"salt:{sha256(salt.encode()).hexdigest()[:8]}")
        tenant = " ".join(parts) or "none"
        if tenant not in self._tenants:
            if len(self._tenants) >= MAX_TENANTS:
                return OTHER_TENANTS
            self._tenants.add(tenant)
        return tenant
