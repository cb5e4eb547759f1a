# SPDX-License-Identifier: Apache-2.0
"""LongContextScheduler beside vLLM's schedulers, in vLLM's engine with a simulated worker."""

from __future__ import annotations

import inspect
import random
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import RequestStatus

from tests.integration.engine_main import tokens
from tests.integration.tiny_models import MAX_MODEL_LEN_TOKENS, save_model
from tests.long_context.simulated_engine import (
    BLOCK_SIZE,
    BYTES_PER_TOKEN,
    GRANULE_TOKENS,
    WINDOW,
    LongEngine,
    long_engine,
)
from tests.support.depth import cases
from vllm_relay.long_context.client import list_contexts
from vllm_relay.long_context.orders import ContextReport, orders_of
from vllm_relay.long_context.scheduling import memory
from vllm_relay.long_context.scheduling.scheduler import HostBlocks, LongContextScheduler

SHORT_TOKENS = WINDOW["min_context_tokens"] - 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model("llama", tmp_path_factory.mktemp("model") / "llama"))


def name_of(request_id: str) -> str:
    """The engine adds something to the ids it is given."""
    return request_id.split("-")[0]


def count_computed_tokens(engine: LongEngine) -> Counter[str]:
    """Tokens that are scheduled from now on, by request."""
    counts: Counter[str] = Counter()

    def on_step(scheduler_output: Any) -> None:
        for request_id, number in scheduler_output.num_scheduled_tokens.items():
            counts[name_of(request_id)] += number

    engine.executor.on_step = on_step
    return counts


def step_until_preempted(engine: LongEngine, request_id: str) -> int:
    """Returns how many of its tokens were computed."""
    for _ in range(400):
        num_computed = engine.num_computed_tokens(request_id)
        engine.step()
        if engine.status(request_id) == RequestStatus.PREEMPTED:
            return num_computed
    raise AssertionError(f"request {request_id} was not preempted")


def test_a_long_request_holds_a_window_and_reads_the_host(model: str) -> None:
    with long_engine(model, num_blocks=9) as engine:
        engine.add("a", tokens(1, 300), 100)
        computed = count_computed_tokens(engine)
        engine.run()
        assert engine.ended == ["a"] and computed == {"a": 399}
        # of the steps of the prompt and of those that decode
        assert engine.executor.reads_from_host > 100 * (300 - 32 - 70 - BLOCK_SIZE)
        assert engine.long_contexts.memory.used_bytes == 0


def test_reservations_grow_with_the_tokens_that_are_computed(model: str) -> None:
    with long_engine(model) as engine:
        memory = engine.long_contexts.memory
        assert memory.bytes_per_token == BYTES_PER_TOKEN
        engine.add("a", tokens(1, 230), 100)
        for expected_tokens in (96, 192, 230, 231, 232):
            engine.step()
            assert engine.num_computed_tokens("a") == expected_tokens
            granules = -(-expected_tokens // GRANULE_TOKENS)
            assert memory.used_bytes == granules * GRANULE_TOKENS * BYTES_PER_TOKEN
        engine.abort("a")
        assert memory.used_bytes == 0


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_preempted_request_goes_on_where_it_was(model: str, asynchronous: bool) -> None:
    # 9 blocks: both begin with two and grow to five, which "a" needs in the middle of one of "b"
    with long_engine(
        model, num_blocks=10, asynchronous=asynchronous, max_num_batched_tokens=64
    ) as engine:
        computed = count_computed_tokens(engine)
        engine.add("a", tokens(1, 45), 300)
        engine.add("b", tokens(2, 50), 300)
        num_computed = step_until_preempted(engine, "b")
        if asynchronous:
            num_computed -= 1  # was in flight
        assert engine.executor.placements == []
        while not engine.executor.placements:
            engine.step()
        a, b = sorted(engine.scheduler.requests)
        engine.long_contexts.forget_preempted()  # it is none any more
        assert engine.long_contexts.memory.holds(a) and engine.long_contexts.memory.holds(b)
        engine.run()
        assert sorted(engine.ended) == ["a", "b"]
        assert engine.executor.dropped == []
        (request_id, placement), *_ = engine.executor.placements
        assert name_of(request_id) == "b"
        assert placement.num_tokens == num_computed and placement.context_id is None
        assert num_computed % BLOCK_SIZE > 0
        if not asynchronous:
            assert computed == {"a": 344, "b": 349}  # none is computed twice
        assert engine.long_contexts.memory.used_bytes == 0


def test_a_dropped_request_begins_again(model: str) -> None:
    with long_engine(model, num_blocks=10, host_tokens=MAX_MODEL_LEN_TOKENS) as engine:
        computed = count_computed_tokens(engine)
        engine.add("a", tokens(1, 50), 300)
        engine.add("b", tokens(2, 50), 300)
        engine.run()
        assert sorted(engine.ended) == ["a", "b"]
        assert {name_of(each) for each in engine.executor.dropped} == {"b"}
        assert computed["a"] == 349 and computed["b"] > 349


def test_requests_wait_while_host_memory_is_full(model: str) -> None:
    with long_engine(model, host_tokens=MAX_MODEL_LEN_TOKENS) as engine:
        engine.add("a", tokens(1, 300), 150)
        for _ in range(5):
            engine.step()
        engine.add("b", tokens(2, 450), 10)
        engine.add("c", tokens(3, 20), 10)
        for _ in range(100):
            engine.step()
            assert engine.long_contexts.memory.used_bytes <= MAX_MODEL_LEN_TOKENS * BYTES_PER_TOKEN
        assert engine.status("a") == RequestStatus.RUNNING
        assert engine.status("b") != RequestStatus.RUNNING
        engine.run()
        assert engine.ended.index("a") < engine.ended.index("b")
        assert sorted(engine.ended) == ["a", "b", "c"]


def test_waiting_requests_keep_no_host_memory_from_running_ones(model: str) -> None:
    with long_engine(
        model, num_blocks=8, host_tokens=MAX_MODEL_LEN_TOKENS, max_num_batched_tokens=64
    ) as engine:
        engine.add("a", tokens(1, 200), 300)
        for _ in range(5):
            engine.step()
        engine.add("b", tokens(2, 100), 10)
        engine.run()


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_short_requests_are_never_touched(model: str, enable_prefix_caching: bool) -> None:
    with long_engine(model, num_blocks=9, enable_prefix_caching=enable_prefix_caching) as engine:
        seen = set()

        def on_step(scheduler_output: Any) -> None:
            seen.add(bool(orders_of(scheduler_output)))
            assert engine.long_contexts.memory.used_bytes == 0

        engine.executor.on_step = on_step
        num_preempted = 0
        for i in range(8):
            engine.add(str(i), tokens(i, 20), SHORT_TOKENS - 19)
        while engine.engine.has_unfinished_requests():
            engine.step()
            statuses = [each.status for each in engine.scheduler.requests.values()]
            num_preempted += RequestStatus.PREEMPTED in statuses
        assert len(engine.ended) == 8 and num_preempted > 0
        assert seen == {False} and engine.executor.reads_from_host == 0
        assert not any(copy.states for copy in engine.executor.copies.values())


def test_without_prefix_caching_a_preempted_request_begins_again(model: str) -> None:
    with long_engine(model, num_blocks=10, enable_prefix_caching=False) as engine:
        computed = count_computed_tokens(engine)
        engine.add("a", tokens(1, 50), 300)
        engine.add("b", tokens(2, 50), 300)
        step_until_preempted(engine, "b")
        (b,) = [each for each in engine.scheduler.requests if name_of(each) == "b"]
        assert not engine.long_contexts.memory.holds(b)
        engine.run()
        assert sorted(engine.ended) == ["a", "b"]
        assert engine.executor.placements == [] and computed["b"] > 349


@pytest.mark.parametrize("reset_running_requests", [True, False])
def test_a_reset_forgets_what_preempted_requests_had(
    model: str, reset_running_requests: bool
) -> None:
    with long_engine(model, num_blocks=10) as engine:
        engine.add("a", tokens(1, 50), 300)
        engine.add("b", tokens(2, 50), 300)
        step_until_preempted(engine, "b")
        memory = engine.long_contexts.memory
        a, b = sorted(engine.scheduler.requests)
        assert memory.holds(a) and memory.holds(b)
        engine.engine.reset_prefix_cache(reset_running_requests)
        assert memory.holds(a) != reset_running_requests and not memory.holds(b)
        for _ in range(20):
            engine.step()
        assert engine.executor.placements == []
        engine.run()
        assert sorted(engine.ended) == ["a", "b"]


def test_workers_let_go_of_what_was_forgotten(model: str) -> None:
    with long_engine(model, num_blocks=10) as engine:
        engine.add("a", tokens(1, 50), 300)
        engine.add("b", tokens(2, 50), 300)
        step_until_preempted(engine, "b")
        engine.engine.reset_prefix_cache(False)
        assert [name_of(each) for each in engine.long_contexts.take_orders().dropped] == ["b"]


def test_too_little_host_memory_is_refused_at_start(model: str) -> None:
    message = (
        "additional_config.relay.host_memory_gib: one request of max_model_len=512 tokens needs "
        "0.00 GiB of host memory, and 0.00 GiB are there: raise it to what the machine has, or "
        "lower --max-model-len"
    )
    too_few = MAX_MODEL_LEN_TOKENS - 1
    with (
        pytest.raises(ValueError, match=re.escape(message)),
        long_engine(model, host_tokens=too_few),
    ):
        pass


@pytest.mark.parametrize("gib", [4.001, 1e6])
def test_more_host_memory_than_there_is_is_refused(
    monkeypatch: pytest.MonkeyPatch, gib: float
) -> None:
    monkeypatch.setattr(memory, "total_bytes", lambda: 4 << 30)
    assert memory.capacity_bytes(4.0) == 4 << 30
    with pytest.raises(ValueError, match=r"host_memory_gib: .* was given, and there are 4.0 GiB"):
        memory.capacity_bytes(gib)


def test_a_model_of_sliding_windows_only_is_refused_at_start() -> None:
    coordinator = SimpleNamespace(single_type_managers=[])
    stock = SimpleNamespace(
        vllm_config=SimpleNamespace(
            additional_config={}, parallel_config=SimpleNamespace(tensor_parallel_size=1)
        ),
        kv_cache_manager=SimpleNamespace(coordinator=coordinator),
        max_model_len=512,
    )
    with pytest.raises(ValueError, match="without a layer of full attention"):
        LongContextScheduler(stock)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("relay", "num_blocks", "host_tokens"),
    [
        ({}, 16, 3 * MAX_MODEL_LEN_TOKENS),
        ({"scheduler": True}, 16, 3 * MAX_MODEL_LEN_TOKENS),
        ({"prefill": "exact_resident"}, 24, 3 * MAX_MODEL_LEN_TOKENS),
        ({"window_tokens": 1, "sink_tokens": 0, "min_context_tokens": 1}, 10, 8 * 512),
    ],
    ids=["vllm", "relay", "resident", "small"],
)
def test_every_token_is_where_the_window_says(
    model: str, asynchronous: bool, relay: dict[str, Any], num_blocks: int, host_tokens: int
) -> None:
    # which seed has placements after preemptions, and of contexts, depends on the release of vLLM
    kinds: set[bool] = set()
    for seed in range(8):
        with long_engine(
            model,
            num_blocks=num_blocks,
            host_tokens=host_tokens,
            asynchronous=asynchronous,
            relay=relay,
            max_num_seqs=6,
        ) as engine:
            run_random_requests(engine, random.Random(seed), asynchronous)
            placements = (placement for _, placement in engine.executor.placements)
            kinds |= {placement.context_id is None for placement in placements}
        if kinds == {True, False}:
            return
    raise AssertionError(f"of placements, only these kinds were seen: {kinds}")


def run_random_requests(engine: LongEngine, rng: random.Random, asynchronous: bool) -> None:
    """Of four families, some of which become contexts, and aborts and resets."""
    memory = engine.long_contexts.memory

    def on_step(scheduler_output: Any) -> None:
        assert memory.used_bytes <= memory.capacity_bytes
        if not asynchronous:  # else what has ended meanwhile is not counted any more
            assert engine.executor.num_host_tokens * BYTES_PER_TOKEN <= memory.used_bytes
        for request_id in scheduler_output.num_scheduled_tokens:
            assert not engine.executor.copies[request_id].states or memory.holds(request_id)

    engine.executor.on_step = on_step
    for number in range(cases(60)):
        family = rng.randrange(4)
        root = tokens(family, 60 * family + 20)
        prompt = root + tokens(100 + rng.randrange(8), rng.randint(1, 180))
        engine.add(str(number), prompt, rng.randint(1, 90), keep=rng.random() < 0.1)
        for _ in range(rng.choice((0, 1, 5, 20, 60))):
            engine.step()
        if rng.random() < 0.1 and engine.prompts:
            engine.abort(rng.choice(sorted(engine.prompts)))
        if rng.random() < 0.03:
            engine.engine.reset_prefix_cache(rng.random() < 0.5)
    engine.run(5000)
    executor = engine.executor
    assert executor.reads_from_host > 0
    assert memory.used_bytes == memory.context_bytes
    assert engine.engine.reset_prefix_cache()


def test_a_context_that_leaves_a_full_folder_is_not_found_again(model: str, tmp_path: Path) -> None:
    folder = {"context_dir": str(tmp_path), "context_disk_gib": 1e-6}
    with long_engine(model, relay=folder) as engine:
        context_id = engine.keep("a", tokens(1, 200))
        assert [each.context_id for each in list_contexts(engine.engine)] == [context_id]
        stored = ContextReport(context_id, 200, "stored", 0, file_bytes=2000)
        engine.long_contexts.contexts.update([stored])
        assert list_contexts(engine.engine) == []
        engine.add("b", tokens(1, 200), 1)
        engine.run()
        assert engine.executor.placements == []


@pytest.mark.skipif(
    "max_cache_hit_length" not in inspect.signature(KVCacheManager.get_computed_blocks).parameters,
    reason="callers of this vLLM cannot bound a hit",
)
def test_a_hit_is_no_longer_than_its_caller_allows(model: str) -> None:
    with long_engine(model) as engine:
        engine.keep("a", tokens(1, 200))
        engine.add("b", tokens(1, 200), 1)
        [request] = engine.scheduler.requests.values()
        get_computed_blocks = engine.scheduler.kv_cache_manager.get_computed_blocks

        blocks, num_tokens, _ = get_computed_blocks(request)
        assert isinstance(blocks, HostBlocks)
        assert get_computed_blocks(request, num_tokens)[1] == num_tokens
        for limit_tokens in (num_tokens - 1, BLOCK_SIZE, 0):
            bounded, num_bounded, _ = get_computed_blocks(request, limit_tokens)
            assert num_bounded <= limit_tokens
            assert not isinstance(bounded, HostBlocks)
        assert get_computed_blocks(request, max_cache_hit_length=BLOCK_SIZE)[1] <= BLOCK_SIZE
        engine.run()


def test_a_context_is_deleted_before_the_worker_knows_it(model: str) -> None:
    with long_engine(model) as engine:
        context_id = engine.keep("a", tokens(1, 200))
        engine.long_contexts.contexts.delete(context_id)
        assert list_contexts(engine.engine) == []
        assert engine.executor.contexts == {}
