# SPDX-License-Identifier: Apache-2.0
"""Statistics of the prefix cache in the engine core."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from vllm_relay.commands.engine import run
from vllm_relay.prefix_cache.pins.commands import COMMANDS
from vllm_relay.prefix_cache.stats import (
    MAX_TENANTS,
    OTHER_TENANTS,
    PrefixCacheRecorder,
    PrefixCacheStats,
    TopPrefixes,
)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def scheduler() -> Any:
    queue = SimpleNamespace(evicted_blocks={})
    pool = SimpleNamespace(hash_block_size=16, free_block_queue=queue)
    return SimpleNamespace(
        kv_cache_manager=SimpleNamespace(block_pool=pool),
        waiting=SimpleNamespace(
            overtakes=0, held_requests=0, leading_requests=0, blocked_requests=0
        ),
        overtaken=SimpleNamespace(count=0),
        pins=SimpleNamespace(num_blocks=0, num_bytes=0),
    )


def request(first_hash: bytes = b"\xab\xcd", num_tokens: int = 64, preemptions: int = 0) -> Any:
    hashes = [first_hash, *(bytes([i]) * 8 for i in range(num_tokens // 16 - 1))]
    return SimpleNamespace(
        num_tokens=num_tokens,
        num_preemptions=preemptions,
        block_hashes=hashes,
        lora_request=None,
        cache_salt=None,
    )


def test_hits_of_resumed_requests_are_saved_but_are_no_hits() -> None:
    recorder = PrefixCacheRecorder(scheduler())
    recorder.on_admitted(request(), 16)
    recorder.on_admitted(request(preemptions=1), 48)
    stats = recorder.take()
    assert stats is not None
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens, stats.tokens_saved) == (64, 16, 64)
    assert recorder.take() is None


def test_hits_are_counted_by_adapter_and_salt() -> None:
    recorder = PrefixCacheRecorder(scheduler())
    salted, adapted = request(), request()
    salted.cache_salt = "a secret"
    adapted.lora_request = SimpleNamespace(lora_name="sql")
    for each, hit_tokens in ((request(), 16), (salted, 0), (salted, 48), (adapted, 32)):
        recorder.on_admitted(each, hit_tokens)
    salted.lora_request = adapted.lora_request
    recorder.on_admitted(salted, 16)
    stats = recorder.take()
    assert stats is not None
    assert stats.tenants == {
        "none": (64, 16),
        "salt:984ca516": (128, 48),
        "lora:sql": (64, 32),
        "lora:sql salt:984ca516": (64, 16),
    }
    stats.merge(stats)
    assert stats.tenants["lora:sql"] == (128, 64)


def test_tenants_are_bounded() -> None:
    recorder = PrefixCacheRecorder(scheduler())
    for index in range(MAX_TENANTS + 20):
        each = request()
        each.cache_salt = str(index)
        recorder.on_admitted(each, 16)
    stats = recorder.take()
    assert stats is not None
    assert len(stats.tenants) == MAX_TENANTS + 1
    assert stats.tenants[OTHER_TENANTS] == (20 * 64, 20 * 16)


def test_the_time_of_scheduling_travels_with_other_news_or_once_a_second() -> None:
    clock = Clock()
    recorder = PrefixCacheRecorder(scheduler(), clock)
    recorder.on_scheduled(0.25)
    assert recorder.take() is None
    recorder.on_admitted(request(), 16)
    recorder.on_scheduled(0.5)
    stats = recorder.take()
    assert stats is not None
    assert (stats.scheduling_steps, stats.scheduling_seconds) == (2, 0.75)
    recorder.on_scheduled(0.125)
    assert recorder.take() is None
    clock.now_s = 1.0
    assert recorder.take() == PrefixCacheStats(scheduling_steps=1, scheduling_seconds=0.125)
    clock.now_s = 9.0
    assert recorder.take() is None


def test_only_what_is_new_is_taken() -> None:
    relay_scheduler = scheduler()
    recorder = PrefixCacheRecorder(relay_scheduler)
    evicted = relay_scheduler.kv_cache_manager.block_pool.free_block_queue.evicted_blocks
    evicted["unused"] = 3
    relay_scheduler.waiting.overtakes = 2
    assert recorder.take() == PrefixCacheStats(overtakes=2, evicted_blocks={"unused": 3})
    assert recorder.take() is None
    evicted["unused"], evicted["needed"] = 4, 1
    assert recorder.take() == PrefixCacheStats(evicted_blocks={"unused": 1, "needed": 1})
    relay_scheduler.pins.num_blocks, relay_scheduler.pins.num_bytes = 2, 64
    assert recorder.take() == PrefixCacheStats(pinned_blocks=2, pinned_bytes=64)
    relay_scheduler.waiting.held_requests = 7
    taken = PrefixCacheStats(pinned_blocks=2, pinned_bytes=64, held_requests=7)
    assert recorder.take() == taken
    relay_scheduler.waiting.leading_requests = 1
    relay_scheduler.waiting.blocked_requests = 2
    relay_scheduler.overtaken = SimpleNamespace(count=3)
    assert recorder.take() == replace(
        taken, leading_requests=1, blocked_requests=2, overtaken_requests=3
    )
    assert recorder.take() is None


def test_most_hit_tokens_come_first() -> None:
    recorder = PrefixCacheRecorder(scheduler())
    for _ in range(3):
        recorder.on_admitted(request(b"\x01\x02\x03\x04\x05"), 16)
    recorder.on_admitted(request(b"\x01\x02\x03\x04\x05"), 0)
    recorder.on_admitted(request(), 64)
    core = SimpleNamespace(scheduler=SimpleNamespace(relay_recorder=recorder))
    top = run(COMMANDS, core, "top_prefixes", {})["result"]
    assert top == [
        {"id": "02" * 4, "tokens": 64, "hits": 1},
        {"id": "01020304", "tokens": 16, "hits": 3},
    ]


def test_rarely_hit_prefixes_are_forgotten() -> None:
    prefixes = TopPrefixes(capacity=8)
    for _ in range(5):
        prefixes.add_hit(b"hot", 32)
    for i in range(100):
        prefixes.add_hit(bytes([i]), 16)
    assert prefixes.top(1)[0]["hits"] == 5
    assert len(prefixes.top(100)) <= 8


def test_text_for_the_log() -> None:
    recorder = PrefixCacheRecorder(scheduler())
    recorder.on_admitted(request(), 16)
    stats = recorder.take()
    assert stats is not None
    assert recorder.text_of(stats) == (
        "prefix cache: 16 of 64 tokens hit (25.0%), blocks evicted: none; 0 blocks (0.0 MiB) "
        "pinned, 0 requests held, 0 overtakes; most used prefixes: abcd (16 tokens, 1 hits)"
    )
