# SPDX-License-Identifier: Apache-2.0
"""Reservations of host memory against a list of what everybody has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.depth import cases
from vllm_relay.long_context.orders import ContextReport
from vllm_relay.long_context.scheduling.catalog import ContextCatalog, ContextRecord, HeldMemory
from vllm_relay.long_context.scheduling.host_memory import GRANULE_TOKENS, HostMemory, Reused

CAPACITY_GRANULES = 10
BYTES_PER_TOKEN = 3
GRANULE_BYTES = GRANULE_TOKENS * BYTES_PER_TOKEN

request_ids, context_ids = st.sampled_from("abcdef"), st.sampled_from("xyz")


class Memory(HostMemory):
    """With contexts that are set and leave by name."""

    def __init__(self, capacity_bytes: int, bytes_per_token: int) -> None:
        self.catalog = ContextCatalog()
        super().__init__(capacity_bytes, bytes_per_token, self.catalog)

    def set_context(self, context_id: str, num_bytes: int) -> None:
        """0: none is there."""
        if not num_bytes:
            self.catalog.remove(context_id)
            return
        if context_id not in self.catalog:
            self.catalog.add(ContextRecord(context_id, np.empty(0, np.int64)))
        parent_id = self.catalog[context_id].parent_id
        report = ContextReport(context_id, 1, "memory", num_bytes, 0, parent_id=parent_id)
        self.catalog.update([report], num_ranks=1)

    def add_context(self, context_id: str, num_bytes: int, request_id: str) -> None:
        """Of a request, which continues what that reads."""
        parent = self.record_read(request_id)
        held = HeldMemory(num_bytes)
        self.catalog.add(ContextRecord(context_id, np.empty(0, np.int64), parent, memory=held))

    def records(self, context_ids: Iterable[str]) -> list[ContextRecord]:
        return [self.catalog[each] for each in context_ids if each in self.catalog]

    def in_the_way(self, request_id: str, num_tokens: int, ids: Iterable[str]) -> list[str]:
        leaving = self.contexts_in_the_way(request_id, num_tokens, self.records(ids))
        return [each.id for each in leaving]


@dataclass(eq=False)
class Context:
    num_granules: int


class HostMemoryMachine(RuleBasedStateMachine):
    """What everybody has, in granules; `preempted` from the oldest to the youngest, `read` by
    request."""

    def __init__(self) -> None:
        super().__init__()
        # a rest that nobody can use
        capacity_bytes = CAPACITY_GRANULES * GRANULE_BYTES + GRANULE_BYTES - 1
        self.memory = Memory(capacity_bytes, BYTES_PER_TOKEN)
        self.held: dict[str, int] = {}
        self.preempted: list[str] = []
        self.contexts: dict[str, Context] = {}
        self.read: dict[str, Context] = {}

    def used(self, gone: Sequence[str] = (), left: Sequence[str] = ()) -> int:
        """When some requests have given up their memory, and some contexts have left."""
        contexts = {each for name, each in self.contexts.items() if name not in left}
        contexts |= {each for name, each in self.read.items() if name not in gone}
        held = sum(each for name, each in self.held.items() if name not in gone)
        return held + sum(each.num_granules for each in contexts)

    @rule(request_id=request_ids, num_tokens=st.integers(0, 12 * GRANULE_TOKENS))
    def reserve(self, request_id: str, num_tokens: int) -> None:
        has, had = self.held.get(request_id, 0), self.memory.used_bytes
        wants = max(has, -(-num_tokens // GRANULE_TOKENS))
        others = [each for each in self.preempted if each != request_id]
        room = CAPACITY_GRANULES - (wants - has)
        # of all ways to drop the youngest so and so many, the shortest
        ways = [others[len(others) - n :][::-1] for n in range(len(others) + 1)]
        enough = [way for way in ways if self.used(way) <= room]
        dropped = self.memory.reserve(request_id, num_tokens)
        if not enough:
            assert dropped is None
            assert self.memory.used_bytes == had
            return
        assert dropped == enough[0]
        for other in dropped:
            del self.held[other]
            self.read.pop(other, None)
        self.preempted = [each for each in others if each not in dropped]
        self.held[request_id] = wants
        assert self.memory.used_bytes <= self.memory.capacity_bytes

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.held)))
        if request_id in self.preempted:  # it is no younger for that
            self.memory.preempt(request_id)
            return
        self.memory.preempt(request_id)
        self.preempted.append(request_id)

    @rule(request_id=request_ids)
    def preempt_one_without_memory(self, request_id: str) -> None:
        if request_id not in self.held:
            self.memory.preempt(request_id)

    @rule(request_id=request_ids)
    def release(self, request_id: str) -> None:
        self.memory.release(request_id)
        self.held.pop(request_id, None)
        self.read.pop(request_id, None)
        self.preempted = [each for each in self.preempted if each != request_id]

    @rule(context_id=context_ids, num_granules=st.integers(0, 6))
    def set_context(self, context_id: str, num_granules: int) -> None:
        self.memory.set_context(context_id, num_granules * GRANULE_BYTES)
        known = self.contexts.get(context_id)
        if known is not None and known.num_granules <= num_granules:
            known.num_granules = num_granules
        else:  # whoever reads it keeps what there was
            self.contexts.pop(context_id, None)
            if num_granules:
                self.contexts[context_id] = Context(num_granules)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), reused=st.none() | st.builds(Reused, context_ids, st.just(5)))
    def begin(self, data: st.DataObject, reused: Reused | None) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.held)))
        self.memory.reuse(request_id, reused)
        assert self.memory.reused(request_id) == reused
        self.read.pop(request_id, None)
        if reused is not None and reused.context_id in self.contexts:
            self.read[request_id] = self.contexts[reused.context_id]

    @rule(
        request_id=request_ids,
        num_granules=st.integers(0, 12),
        by_last_use=st.permutations("xyz"),
    )
    def make_contexts_leave(
        self, request_id: str, num_granules: int, by_last_use: list[str]
    ) -> None:
        has = self.held.get(request_id, 0)
        room = CAPACITY_GRANULES - max(0, num_granules - has)
        others = [each for each in self.preempted if each != request_id]
        readers = self.held.keys() - set(others) | {request_id}
        read = [self.read[each] for each in readers if each in self.read]
        free = [
            each
            for each in by_last_use
            if each in self.contexts and self.contexts[each] not in read
        ]
        ways = [free[:n] for n in range(len(free) + 1)]
        enough = [way for way in ways if self.used(others, way) <= room]
        num_tokens = num_granules * GRANULE_TOKENS
        leaving = self.memory.in_the_way(request_id, num_tokens, by_last_use)
        assert leaving == (enough[0] if enough else [])
        for each in leaving:
            self.set_context(each, 0)
        if leaving:
            self.reserve(request_id, num_tokens)
            assert self.memory.holds(request_id) and request_id not in self.preempted

    @invariant()
    def everybody_has_what_was_given(self) -> None:
        held = sum(self.held.values())
        assert self.memory.used_bytes == self.used() * GRANULE_BYTES
        assert self.memory.context_bytes == (self.used() - held) * GRANULE_BYTES
        for request_id in "abcdef":
            assert self.memory.holds(request_id) == (request_id in self.held)
            running = self.held.keys() - set(self.preempted) - {request_id}
            assert self.memory.is_alone(request_id) == (not running)


TestHostMemory = HostMemoryMachine.TestCase
TestHostMemory.settings = settings(max_examples=cases(38), stateful_step_count=40, deadline=None)


def test_requests_take_whole_granules() -> None:
    memory = Memory(1 << 30, BYTES_PER_TOKEN)
    sizes = {0: 0, 1: 1, GRANULE_TOKENS: 1, GRANULE_TOKENS + 1: 2}
    for num_tokens, num_granules in sizes.items():
        assert memory.bytes_for(num_tokens) == num_granules * GRANULE_BYTES


def test_the_youngest_preempted_request_gives_way_and_the_oldest_stays() -> None:
    memory = Memory(3 * GRANULE_BYTES, BYTES_PER_TOKEN)
    for request_id in "abc":
        assert memory.reserve(request_id, 1) == []
        memory.preempt(request_id)
    assert memory.reserve("d", GRANULE_TOKENS + 1) == ["c", "b"]
    assert memory.holds("a") and not memory.holds("b")
    # nobody gives way for what does not fit even so
    assert memory.reserve("e", 2 * GRANULE_TOKENS) is None
    assert memory.holds("a")
    # a request that goes on is not dropped for its own sake
    memory.release("d")
    assert memory.reserve("a", 3 * GRANULE_TOKENS) == []
    assert memory.used_bytes == memory.capacity_bytes


def test_a_context_that_is_read_counts_until_its_last_reader_has_ended() -> None:
    memory = Memory(10 * GRANULE_BYTES, BYTES_PER_TOKEN)
    memory.set_context("x", 4 * GRANULE_BYTES)
    for request_id in "ab":
        assert memory.reserve(request_id, 1) == []
        memory.reuse(request_id, Reused("x", 4 * GRANULE_TOKENS))
    memory.set_context("x", 0)
    assert memory.used_bytes == 6 * GRANULE_BYTES
    memory.set_context("x", 2 * GRANULE_BYTES)  # kept again: another one
    memory.release("a")
    assert memory.context_bytes == 6 * GRANULE_BYTES
    memory.preempt("b")
    assert memory.context_bytes == 6 * GRANULE_BYTES
    # who gives way for another reads no more either
    assert memory.reserve("c", 8 * GRANULE_TOKENS) == ["b"]
    assert memory.used_bytes == memory.capacity_bytes


def test_a_context_that_has_become_a_file_stays_in_memory_for_its_readers() -> None:
    memory = Memory(10 * GRANULE_BYTES, BYTES_PER_TOKEN)
    memory.set_context("x", 4 * GRANULE_BYTES)
    assert memory.reserve("a", 1) == []
    memory.reuse("a", Reused("x", 4 * GRANULE_TOKENS))
    memory.catalog.update([ContextReport("x", 1, "stored", 0, 9)], num_ranks=1)
    assert memory.reserve("b", 1) == []
    memory.reuse("b", Reused("x", 4 * GRANULE_TOKENS))
    memory.release("a")
    assert memory.used_bytes == GRANULE_BYTES


def test_contexts_that_are_read_do_not_leave() -> None:
    memory = Memory(10 * GRANULE_BYTES, BYTES_PER_TOKEN)
    for context_id in "xyz":
        memory.set_context(context_id, 3 * GRANULE_BYTES)
    assert memory.reserve("a", 1) == []
    memory.reuse("a", Reused("x", 3 * GRANULE_TOKENS))
    assert memory.in_the_way("b", 3 * GRANULE_TOKENS, "xyz") == ["y"]
    assert memory.in_the_way("b", 6 * GRANULE_TOKENS, "xyz") == ["y", "z"]
    assert memory.in_the_way("b", 7 * GRANULE_TOKENS, "xyz") == []
    # a preempted request gives way together with what it reads
    memory.preempt("a")
    assert memory.in_the_way("b", 7 * GRANULE_TOKENS, "xyz") == ["x", "y"]
    # but not for itself
    assert memory.in_the_way("a", 7 * GRANULE_TOKENS, "xyz") == ["y", "z"]


def test_many_requests_behind_one_context_take_what_they_add() -> None:
    """131,072 tokens of 32 layers with 8 kv heads of 128 in bfloat16, in 64 GiB."""
    bytes_per_token = 32 * 8 * (2 * 2 * 128 + 128)
    memory, num_tokens = Memory(64 << 30, bytes_per_token), 131_072
    memory.set_context("x", memory.bytes_for(num_tokens))
    for number in range(100):
        assert memory.reserve(str(number), 256) == []
        memory.reuse(str(number), Reused("x", num_tokens))
    assert memory.reserve("without", num_tokens) == []


def test_what_a_context_continues_counts_once_and_as_long_as_it_is_there() -> None:
    memory = Memory(20 * GRANULE_BYTES, BYTES_PER_TOKEN)
    memory.set_context("x", 4 * GRANULE_BYTES)
    for request_id, context_id in (("a", "y"), ("b", "z")):
        assert memory.reserve(request_id, 1) == []
        memory.reuse(request_id, Reused("x", 4 * GRANULE_TOKENS))
        memory.add_context(context_id, GRANULE_BYTES, request_id)
        memory.release(request_id)
    assert memory.context_bytes == 6 * GRANULE_BYTES
    memory.set_context("x", 3 * GRANULE_BYTES)  # its indexes are built
    assert memory.context_bytes == 5 * GRANULE_BYTES
    # nothing is freed by the first one before the others have left
    assert memory.in_the_way("c", 16 * GRANULE_TOKENS, "xyz") == ["y"]
    assert memory.in_the_way("c", 18 * GRANULE_TOKENS, "xyz") == ["y", "z", "x"]
    freed = [
        memory.freed_bytes(memory.records(ids)) // GRANULE_BYTES for ids in ("x", "y", "xy", "xyz")
    ]
    assert freed == [0, 1, 1, 5]
    memory.set_context("x", 0)
    assert memory.context_bytes == 5 * GRANULE_BYTES
    memory.set_context("y", 0)
    assert memory.context_bytes == 4 * GRANULE_BYTES
    memory.set_context("z", 0)
    assert memory.context_bytes == 0
