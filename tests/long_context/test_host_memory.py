# SPDX-License-Identifier: Apache-2.0
"""Reservations of host memory against a list of what everybody has."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.depth import cases
from vllm_relay.long_context.host_memory import GRANULE_TOKENS, HostMemory

CAPACITY_GRANULES = 10
BYTES_PER_TOKEN = 3
GRANULE_BYTES = GRANULE_TOKENS * BYTES_PER_TOKEN

request_ids = st.sampled_from("abcdef")


class HostMemoryMachine(RuleBasedStateMachine):
    """What everybody has, in granules; `preempted` from the oldest to the youngest."""

    def __init__(self) -> None:
        super().__init__()
        # a rest that nobody can use
        capacity_bytes = CAPACITY_GRANULES * GRANULE_BYTES + GRANULE_BYTES - 1
        self.memory = HostMemory(capacity_bytes, BYTES_PER_TOKEN)
        self.held: dict[str, int] = {}
        self.preempted: list[str] = []
        self.contexts: dict[str, int] = {}

    @property
    def used(self) -> int:
        return sum(self.held.values()) + sum(self.contexts.values())

    def state(self) -> tuple[dict[str, int], list[str], int]:
        return dict(self.held), list(self.preempted), self.memory.used_bytes

    @rule(request_id=request_ids, num_tokens=st.integers(0, 12 * GRANULE_TOKENS))
    def reserve(self, request_id: str, num_tokens: int) -> None:
        has, had = self.held.get(request_id, 0), self.memory.used_bytes
        wants = max(has, -(-num_tokens // GRANULE_TOKENS))
        others = [each for each in self.preempted if each != request_id]
        missing = self.used - has + wants - CAPACITY_GRANULES
        # of all ways to drop the youngest so and so many, the shortest
        ways = [others[len(others) - n :][::-1] for n in range(len(others) + 1)]
        enough = [way for way in ways if sum(self.held[each] for each in way) >= missing]
        dropped = self.memory.reserve(request_id, num_tokens)
        if not enough:
            assert dropped is None
            assert self.memory.used_bytes == had
            return
        assert dropped == enough[0]
        for other in dropped:
            del self.held[other]
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
        self.preempted = [each for each in self.preempted if each != request_id]

    @rule(context_id=st.sampled_from("xyz"), num_granules=st.integers(0, 6))
    def set_context(self, context_id: str, num_granules: int) -> None:
        self.memory.set_context(context_id, num_granules * GRANULE_BYTES)
        self.contexts[context_id] = num_granules

    @invariant()
    def everybody_has_what_was_given(self) -> None:
        assert self.memory.used_bytes == self.used * GRANULE_BYTES
        assert self.memory.context_bytes == sum(self.contexts.values()) * GRANULE_BYTES
        for request_id in "abcdef":
            assert self.memory.holds(request_id) == (request_id in self.held)


TestHostMemory = HostMemoryMachine.TestCase
TestHostMemory.settings = settings(max_examples=cases(38), stateful_step_count=40, deadline=None)


def test_requests_take_whole_granules() -> None:
    memory = HostMemory(1 << 30, BYTES_PER_TOKEN)
    sizes = {0: 0, 1: 1, GRANULE_TOKENS: 1, GRANULE_TOKENS + 1: 2}
    for num_tokens, num_granules in sizes.items():
        assert memory.bytes_for(num_tokens) == num_granules * GRANULE_BYTES


def test_the_youngest_preempted_request_gives_way_and_the_oldest_stays() -> None:
    memory = HostMemory(3 * GRANULE_BYTES, BYTES_PER_TOKEN)
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
