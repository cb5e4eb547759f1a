# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from vllm_relay.scheduler.fairness import OvertakeLimit
from vllm_relay.scheduler.order import PrefixOrder
from vllm_relay.scheduler.request_queue import PrefixRequestQueue, QueueObserver


@dataclass(eq=False)
class FakeRequest:
    """What the queue asks a vLLM Request."""

    request_id: str
    chain: tuple[bytes, ...] = ()
    priority: int = 0
    status: RequestStatus = RequestStatus.WAITING
    reason: str | None = None

    def is_finished(self) -> bool:
        return RequestStatus.is_finished(self.status)


@dataclass
class Log(QueueObserver):
    waiting: set[Any] = field(default_factory=set)
    uses: int = 0
    calls: int = 0

    def waits(self, request: Any, position: int) -> None:
        assert request not in self.waiting
        self.waiting.add(request)
        self.calls += 1

    def waits_no_longer(self, request: Any, position: int, runs: bool) -> None:
        self.waiting.remove(request)
        self.uses += runs
        self.calls += 1


class Setup:
    def __init__(
        self, *, by_priority: bool = False, max_hold_s: float = 0.0, max_overtakes: int = 10**9
    ) -> None:
        self.now_s, self.resident = 0.0, set[bytes]()
        self.log = Log()
        self.queue = PrefixRequestQueue(
            by_priority,
            lambda request: request.chain,
            lambda: PrefixOrder(self.resident.__contains__, max_hold_s),
            lambda: OvertakeLimit(1e9, max_overtakes),
            self.log,
            lambda request: request.reason,
            clock=lambda: self.now_s,
        )

    def add(self, *requests: Any) -> None:
        for request in requests:
            self.queue.add_request(request)

    def schedule(self, blocked: tuple[Any, ...] = (), room: int = 10**9) -> list[str]:
        """One scan as vLLM's: what is blocked is popped, and given back in reverse."""
        ran, skipped = [], []
        self.offered: list[str] = []
        while self.queue and len(ran) < room:
            request: Any = self.queue.peek_request()
            assert self.queue.pop_request() is request
            self.offered.append(request.request_id)
            if request in blocked:
                skipped.insert(0, request)
            else:
                request.status = RequestStatus.RUNNING
                ran.append(request.request_id)
        self.queue.prepend_requests(skipped)
        assert set(self.queue) == self.log.waiting
        assert len(self.queue) == len(self.log.waiting)
        return ran


def requests(*names: str, **kwargs: Any) -> list[Any]:
    """Requests whose prefix is the first letter of their name."""
    return [FakeRequest(name, (name[0].encode(), name.encode()), **kwargs) for name in names]


def test_prefix_by_prefix() -> None:
    setup = Setup()
    setup.add(*requests("a1", "b1", "a2", "b2"))
    assert setup.schedule() == ["a1", "a2", "b1", "b2"]
    assert setup.log.uses == 4
    assert not setup.queue


def test_requests_without_a_full_block_wait_their_turn() -> None:
    setup = Setup()
    short: Any = FakeRequest("short")
    setup.add(*requests("a1"), short, *requests("b1"))
    assert setup.schedule() == ["a1", "short", "b1"]


def test_what_is_skipped_stays_in_its_place_and_has_not_run() -> None:
    setup = Setup(max_hold_s=1e9)
    first, second, third = same = requests("a1", "a1", "a1")
    for number, request in enumerate(same):
        request.request_id = str(number)
    setup.add(*same)
    calls = setup.log.calls
    for _ in range(3):
        assert setup.schedule(blocked=tuple(same)) == []
        assert list(setup.queue) == same
    assert (setup.log.uses, setup.log.calls) == (0, calls)
    assert setup.queue.overtakes == 0
    assert setup.schedule(blocked=(first,)) == ["1"]  # and "2" is held until its prefix is there
    setup.resident.update(second.chain)
    assert setup.schedule(blocked=(first,)) == ["2"]
    assert setup.queue.overtakes == 0  # the first could not run whatever the order
    assert setup.schedule() == ["0"]
    assert third.status == RequestStatus.RUNNING


def test_one_of_those_deferred_for_a_reason_tries_again() -> None:
    setup = Setup(max_hold_s=1e9)
    adapter = requests("a1", "a2", "b1", reason="adapter")
    grammar = requests("a3", "b2", reason="grammar")
    free = requests("c1", "c2")
    setup.add(*adapter, *grammar, *free)
    blocked = (*adapter, *grammar)
    assert setup.schedule(blocked) == ["c1"]
    assert sorted(setup.offered) == ["a1", "a2", "a3", "b1", "b2", "c1"]
    setup.resident.update(free[0].chain)
    assert setup.schedule(blocked) == ["c2"]
    assert sorted(setup.offered) == ["a1", "a3", "c2"]
    # a prefix of those who come back is warmed up as ever
    assert setup.schedule(blocked=tuple(grammar)) == ["a1", "b1"]
    assert setup.queue.held_requests == 2  # a2 and the one that tries for its grammar
    setup.resident.update(adapter[0].chain)
    assert setup.schedule() == ["a2", "a3"]
    setup.resident.update(adapter[2].chain)
    assert setup.schedule() == ["b2"]
    assert len(setup.queue) == 0


def test_those_behind_a_request_that_is_aborted_try_again() -> None:
    setup = Setup()
    first, second, third, fourth = waiting = requests("a1", "a2", "a3", "a4", reason="adapter")
    setup.add(*waiting)
    for _ in range(2):
        assert setup.schedule(blocked=tuple(waiting)) == []
    assert setup.offered == ["a1"]
    setup.queue.remove_request(third)
    assert setup.schedule(blocked=tuple(waiting)) == []
    assert setup.offered == ["a1"]
    setup.queue.remove_request(first)
    assert setup.schedule() == ["a2", "a4"]
    for request in waiting:
        setup.queue.release(request)
        setup.queue.forget(request)
    assert setup.queue.num_records() == 0


def test_preempted_requests_go_on_first_and_in_order() -> None:
    setup = Setup()
    a1, b1, c1 = requests("a1", "b1", "c1")
    setup.add(a1, b1)
    setup.schedule()
    setup.add(c1)
    for request in (b1, a1):  # the last to run is preempted first
        request.status = RequestStatus.PREEMPTED
        setup.queue.prepend_request(request)
    assert setup.schedule() == ["a1", "b1", "c1"]


def test_a_preempted_request_may_finish_before_it_is_removed() -> None:
    """Asynchronous scheduling: its last token was in flight."""
    setup = Setup()
    [request] = requests("a1")
    setup.add(request)
    setup.schedule()
    request.status = RequestStatus.PREEMPTED
    setup.queue.prepend_request(request)
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    setup.queue.release(request)
    setup.queue.forget(request)
    setup.queue.remove_requests({request})
    assert len(setup.queue) == 0
    assert setup.queue.num_records() == 0


def test_aborted_requests_leave_nothing() -> None:
    setup = Setup()
    waiting = requests("a1", "a2", "b1")
    setup.add(*waiting)
    stranger = requests("z1")
    for request in waiting:
        request.status = RequestStatus.FINISHED_ABORTED
    setup.queue.remove_requests([*waiting, *stranger])
    assert (len(setup.queue), setup.queue.num_records()) == (0, 0)
    with pytest.raises(ValueError, match="does not wait"):
        setup.queue.remove_request(waiting[0])


def test_priorities_are_not_mixed_and_leave_nothing() -> None:
    setup = Setup(by_priority=True)
    late, soon = requests("a1", "a2", priority=2), requests("b1", "a3", priority=1)
    setup.add(*late, *soon)
    assert setup.schedule() == ["b1", "a3", "a1", "a2"]
    for priority in range(1000):
        [request] = requests("a1", priority=priority)
        setup.add(request)
        assert setup.schedule() == ["a1"]
        setup.queue.forget(request)
    assert len(setup.queue._classes) == 0


def test_nobody_is_overtaken_too_often() -> None:
    setup = Setup(max_overtakes=2)
    setup.add(*requests("a1", "b1", "a2", "a3", "a4", "a5"))
    assert setup.schedule() == ["a1", "a2", "a3", "b1", "a4", "a5"]
    assert setup.queue.overtakes == 2


def test_a_prefix_that_always_waits_does_not_make_the_queue_grow() -> None:
    setup = Setup(max_overtakes=0)  # everybody runs by seniority, past the heaps
    setup.add(*requests("a1", "a2"))
    order = setup.queue._classes[0].order
    for number in range(2000):
        setup.add(FakeRequest(f"u{number}", (b"u%d" % number,)), *requests("a3"))
        setup.schedule(room=2)
    assert len(order._root.queue) < 300
