# SPDX-License-Identifier: Apache-2.0
"""Host memory of stored contexts and of the requests behind them, with a simulated worker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from tests.integration.engine_main import tokens
from tests.integration.tiny_models import MAX_MODEL_LEN_TOKENS, save_model
from tests.long_context.simulated_engine import (
    BYTES_PER_TOKEN,
    GRANULE_TOKENS,
    LongEngine,
    long_engine,
)
from vllm_relay.long_context.client import delete_context
from vllm_relay.long_context.orders import ContextReport


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model("llama", tmp_path_factory.mktemp("model") / "llama"))


def granules_of(*num_tokens: int) -> int:
    """Tokens for which these take memory."""
    return sum(-(-each // GRANULE_TOKENS) * GRANULE_TOKENS for each in num_tokens)


def used_tokens(engine: LongEngine) -> int:
    return engine.long_contexts.memory.used_bytes // BYTES_PER_TOKEN


def check_memory(engine: LongEngine) -> None:
    """In each step, what the worker has is counted, and nothing is beyond the capacity."""
    memory = engine.long_contexts.memory

    def on_step(scheduler_output: Any) -> None:
        assert engine.executor.num_host_tokens <= used_tokens(engine)
        assert memory.used_bytes <= memory.capacity_bytes

    engine.executor.on_step = on_step


def step_until(engine: LongEngine, happened: Callable[[], bool]) -> None:
    for _ in range(400):
        if happened():
            return
        engine.step()
    raise AssertionError("it did not happen")


def test_requests_behind_a_context_take_only_what_follows_it(model: str) -> None:
    prompt = tokens(1, 440)
    with long_engine(model, num_blocks=120, max_num_seqs=32) as engine:
        check_memory(engine)
        engine.keep("context", prompt)
        for number in range(20):
            engine.add(str(number), [*prompt, number], 40)
        step_until(engine, lambda: len(engine.scheduler.running) == 20)
        assert used_tokens(engine) == granules_of(440, *[1] * 20)
        engine.run()
        assert len(engine.ended) == 21 and engine.executor.dropped == []
        assert used_tokens(engine) == granules_of(440)


def test_a_preempted_request_keeps_what_follows_its_context(model: str) -> None:
    prompt = tokens(1, 100)
    with long_engine(model, num_blocks=8, max_num_batched_tokens=64) as engine:
        check_memory(engine)
        engine.keep("context", prompt)
        engine.add("a", [*prompt, 1], 300)
        engine.add("b", [*prompt, 2], 300)
        step_until(engine, lambda: engine.status("b") == RequestStatus.PREEMPTED)
        num_computed, [num_kept] = (
            engine.num_computed_tokens("a"), engine.long_contexts._preempted.values()
        )  # fmt: skip
        assert used_tokens(engine) == granules_of(100, num_computed - 100, num_kept - 100)
        num_placed = len(engine.executor.placements)
        step_until(engine, lambda: len(engine.executor.placements) > num_placed)
        _, placement = engine.executor.placements[num_placed]
        assert (placement.num_tokens, placement.context_id) == (num_kept, None)
        engine.run()
        assert sorted(engine.ended) == ["a", "b", "context"]
        assert engine.executor.dropped == [] and used_tokens(engine) == granules_of(100)


def test_a_request_that_loses_its_context_takes_memory_for_all_tokens(model: str) -> None:
    prompt = tokens(1, 300)
    with long_engine(model) as engine:
        context_id = engine.keep("context", prompt)
        engine.add("a", [*prompt, 7], 100)
        step_until(engine, lambda: engine.num_computed_tokens("a") > 305)
        assert used_tokens(engine) == granules_of(300, 6)
        [request_id] = engine.scheduler.requests
        engine.long_contexts.restart(engine.scheduler, {request_id: context_id})
        assert used_tokens(engine) == 0
        step_until(engine, lambda: engine.num_computed_tokens("a") > 305)
        assert used_tokens(engine) == granules_of(engine.num_computed_tokens("a"))
        engine.run()
        assert engine.ended == ["context", "a"] and used_tokens(engine) == 0


def test_a_deleted_context_counts_until_nobody_reads_it(model: str) -> None:
    prompt = tokens(1, 200)
    with long_engine(model) as engine:
        check_memory(engine)
        context_id = engine.keep("context", prompt)
        engine.add("a", [*prompt, 7], 20)
        engine.add("b", [*prompt, 8], 50)
        step_until(engine, lambda: len(engine.scheduler.running) == 2)
        delete_context(engine.engine, context_id)
        assert used_tokens(engine) == granules_of(200, 1, 1)
        # kept again, it is another one
        engine.add("again", prompt, 1, keep=True)
        step_until(engine, lambda: "again" in engine.ended)
        assert used_tokens(engine) == granules_of(200, 200, 30, 30)
        engine.run()
        assert used_tokens(engine) == granules_of(200)


def test_contexts_leave_for_requests_but_none_that_is_read(model: str) -> None:
    read, unread = tokens(1, 200), tokens(2, 200)
    with long_engine(model, host_tokens=2 * MAX_MODEL_LEN_TOKENS) as engine:
        check_memory(engine)
        kept = [engine.keep("read", read), engine.keep("unread", unread)]
        engine.add("a", [*read, 7], 250)
        engine.add("b", tokens(3, 300), 140)
        engine.run()
        # neither waited for the other
        assert set(engine.executor.contexts) == {
            each.id for each in engine.long_contexts.contexts.catalog
        }
        assert list(engine.executor.contexts) == kept[:1]
        assert engine.executor.dropped == [] and engine.ended[-2:] == ["b", "a"]
        engine.add("c", tokens(4, 300), 200)
        engine.add("d", tokens(5, 300), 200)
        engine.run()
        assert engine.executor.contexts == {} and engine.executor.dropped == []


def test_the_context_used_least_recently_leaves_first(model: str) -> None:
    with long_engine(model, host_tokens=2 * MAX_MODEL_LEN_TOKENS) as engine:
        check_memory(engine)
        first, _ = engine.keep("first", tokens(1, 200)), engine.keep("second", tokens(2, 200))
        engine.add("use", [*tokens(1, 200), 7], 1)
        engine.run()
        engine.add("a", tokens(3, 300), 100)
        engine.add("b", tokens(4, 200), 10)
        engine.run()
        assert list(engine.executor.contexts) == [first]


def test_contexts_that_are_written_leave_for_nobody_who_can_wait(
    model: str, tmp_path: Path
) -> None:
    with long_engine(
        model, host_tokens=2 * MAX_MODEL_LEN_TOKENS, relay={"context_dir": str(tmp_path)}
    ) as engine:
        check_memory(engine)
        kept = [engine.keep("first", tokens(1, 200)), engine.keep("second", tokens(2, 200))]
        for number in range(3):
            engine.add(str(number), tokens(3 + number, 300), 150)
        engine.run()
        assert list(engine.executor.contexts) == kept


@pytest.mark.parametrize("is_read", [False, True])
def test_no_context_keeps_a_request_waiting_for_ever(model: str, is_read: bool) -> None:
    """Its indexes may take what the longest request needs."""
    prompt = tokens(1, 200)
    with long_engine(model, host_tokens=2 * MAX_MODEL_LEN_TOKENS) as engine:
        context_id = engine.keep("context", prompt)
        grown = ContextReport(context_id, 200, "memory", 1000 * BYTES_PER_TOKEN, 0)
        if is_read:
            engine.add("reader", [*prompt, 7], 300)
            step_until(engine, lambda: engine.num_computed_tokens("reader") > 201)
        else:
            engine.step()
        engine.long_contexts.contexts.update([grown])
        engine.add("another", tokens(2, 400), 100)
        engine.add("behind it", [*prompt, 8], 300)
        engine.run()
        assert len(engine.ended) == 3 + is_read
        assert used_tokens(engine) == 0 and engine.executor.contexts == {}


def test_a_request_begins_without_a_context_that_leaves_it_no_room(model: str) -> None:
    prompt = tokens(1, 200)
    with long_engine(model, host_tokens=2 * MAX_MODEL_LEN_TOKENS) as engine:
        context_id = engine.keep("context", prompt)
        engine.step()
        grown = ContextReport(context_id, 200, "memory", 1000 * BYTES_PER_TOKEN, 0)
        engine.long_contexts.contexts.update([grown])
        engine.add("a", [*prompt, 7], 300)
        engine.run()
        assert engine.executor.placements == [] and engine.executor.contexts == {}


@pytest.mark.parametrize("num_others", [640, 1088])
def test_a_request_behind_a_context_is_kept_in_the_memory_that_it_has(
    model: str, num_others: int
) -> None:
    prompt = tokens(1, 200)
    with long_engine(model, host_tokens=3 * MAX_MODEL_LEN_TOKENS) as engine:
        memory = engine.long_contexts.memory
        context_id = engine.keep("context", prompt)
        engine.add("a", [*prompt, *tokens(2, 100)], 2, keep=True)
        assert memory.reserve("others", num_others) == []
        engine.run()
        [report] = engine.long_contexts.contexts.pending()
        assert report.num_tokens == 301 and report.parent_id == context_id
        assert used_tokens(engine) == num_others + granules_of(200, 101)
        assert memory.used_bytes <= memory.capacity_bytes
        # the first ones stay as long as the others need them
        engine.long_contexts.contexts.delete(context_id)
        assert used_tokens(engine) == num_others + granules_of(200, 101)
        engine.long_contexts.contexts.delete(report.context_id)
        assert used_tokens(engine) == num_others
