# SPDX-License-Identifier: Apache-2.0
"""RelayScheduler alone: what it schedules, without an engine that computes anything."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import EngineArgs, SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    FreeKVCacheBlockQueue,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from vllm_relay.scheduler import RelayScheduler
from vllm_relay.scheduler.vllm_scheduler import TENANT_OF

BLOCK_SIZE = 32
NUM_BLOCKS = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    config = {"model_type": "opt", "architectures": ["OPTForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def kv_cache_config() -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float)
    return KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])


def make_scheduler(
    model: str, prefix_caching: bool = True, eviction: str = "queue", policy: str = "fcfs"
) -> Any:
    init_none_hash(sha256)
    cache_options = {"eviction": eviction} if prefix_caching else {}
    config = EngineArgs(
        model=model,
        skip_tokenizer_init=True,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=512,
        max_num_seqs=16,
        scheduling_policy=policy,
        long_prefill_token_threshold=2 * BLOCK_SIZE,  # a step does not compute a prompt
        enable_prefix_caching=prefix_caching,
        additional_config={"relay": {"scheduler": True, "max_hold_s": 1e6, **cache_options}},
    ).create_engine_config(UsageContext.ENGINE_CONTEXT)
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    return RelayScheduler(
        vllm_config=config,
        kv_cache_config=kv_cache_config(),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
    )


def request(name: str, first_token: int = 0, **sampling: Any) -> Request:
    """A request with the prompt that all with its first token have."""
    return Request(
        request_id=name,
        prompt_token_ids=list(range(first_token, first_token + 4 * BLOCK_SIZE)),
        sampling_params=SamplingParams(max_tokens=2, **sampling),
        pooling_params=None,
        # an engine with a KV connector hashes blocks also where its own prefix caching is off
        block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
    )


def scheduled(scheduler: Any, *requests: Request) -> list[str]:
    for each in requests:
        scheduler.add_request(each)
    return list(scheduler.schedule().num_scheduled_tokens)


def test_requests_wait_for_a_prefix_that_they_can_read(model: str) -> None:
    scheduler = make_scheduler(model)
    other = request("c", first_token=5)
    assert scheduled(scheduler, request("a"), request("b"), other) == ["a", "c"]
    assert scheduler.waiting.held_requests == 1
    stats = scheduler.relay_recorder.take()
    assert (stats.held_requests, stats.leading_requests, stats.overtaken_requests) == (1, 1, 1)
    assert stats.scheduling_steps == 1
    assert stats.scheduling_seconds > 0


def test_nobody_waits_for_a_prefix_without_prefix_caching(model: str) -> None:
    scheduler = make_scheduler(model, prefix_caching=False)
    assert scheduled(scheduler, request("a"), request("b")) == ["a", "b"]
    assert not scheduler.next_use._waiting


def test_blocks_are_cached_if_all_of_them_are(model: str) -> None:
    scheduler = make_scheduler(model)
    first = request("a")
    scheduled(scheduler, first)
    hashes = first.block_hashes[:2]  # of its first step
    assert scheduler.has_cached(hashes) and scheduler.has_cached([])
    for lost in hashes:
        scheduler = make_scheduler(model)
        scheduled(scheduler, request("a"))
        block = scheduler.cached_block(lost)
        assert block is not None
        scheduler.kv_cache_manager.evict_blocks({block.block_id})
        assert not scheduler.has_cached(hashes)
        assert any(scheduler.cached_block(each) is not None for each in hashes)


@pytest.mark.parametrize("sampling", [{"prompt_logprobs": 1}, {"skip_reading_prefix_cache": True}])
def test_nobody_waits_for_a_prefix_that_they_may_not_read(
    model: str, sampling: dict[str, Any]
) -> None:
    scheduler = make_scheduler(model)
    others = [request(name, **sampling) for name in ("b", "c")]
    assert scheduled(scheduler, request("a"), *others, request("d")) == ["a", "b", "c"]
    assert list(scheduler.waiting) == [scheduler.requests["d"]]
    assert len(scheduler.next_use._waiting) == 1


@pytest.mark.parametrize("eviction", ["queue", "lru"])
def test_a_block_pool_with_the_queue_of_vllm(model: str, eviction: str) -> None:
    scheduler = make_scheduler(model, eviction=eviction)
    scheduler.kv_cache_manager = KVCacheManager(
        kv_cache_config(),
        max_model_len=scheduler.max_model_len,
        scheduler_block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
    )
    queue = scheduler.kv_cache_manager.block_pool.free_block_queue
    assert type(queue) is FreeKVCacheBlockQueue
    first = request("a")
    assert scheduled(scheduler, first, request("b")) == ["a"]
    scheduler.finish_requests("a", first.status.FINISHED_ABORTED)
    assert queue.num_free_blocks == NUM_BLOCKS - 1
    assert scheduled(scheduler) == ["b"]


@pytest.mark.parametrize(("policy", "first", "last"), [("fcfs", "a", "c"), ("priority", "c", "a")])
def test_eviction_expects_requests_by_priority_and_arrival(
    model: str, policy: str, first: str, last: str
) -> None:
    scheduler = make_scheduler(model, policy=policy)
    requests = [request(name) for name in "abc"]
    for index, each in enumerate(requests):
        each.priority = 3 - index
        scheduler.add_request(each)
    key = scheduler.block_keys(requests[0])[0][0]
    soonest = scheduler.next_use.next_use(key)
    scheduler.finish_requests(last, requests[0].status.FINISHED_ABORTED)
    assert scheduler.next_use.next_use(key) == soonest
    scheduler.finish_requests(first, requests[0].status.FINISHED_ABORTED)
    assert scheduler.next_use.next_use(key) > soonest


@pytest.mark.parametrize(
    ("extra_args", "tenant"),
    [
        (None, None),
        ({"tenant": "a"}, "a"),
        ({"tenant": 7}, "7"),
        ({"tenant": ["a"]}, None),
        ({"tenant": 1.5}, None),
    ],
)
def test_labels_of_tenants_are_texts(extra_args: dict[str, Any] | None, tenant: str | None) -> None:
    request: Any = SimpleNamespace(sampling_params=SimpleNamespace(extra_args=extra_args))
    assert TENANT_OF["label"](request) == tenant
