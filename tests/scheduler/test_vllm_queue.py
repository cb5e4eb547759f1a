# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from tests.support.records import records_of_queue
from vllm_relay.scheduler.fairness import OvertakeLimit
from vllm_relay.scheduler.lanes import Lanes
from vllm_relay.scheduler.order import PrefixOrder
from vllm_relay.scheduler.tenants import Shares, TenantLanes
from vllm_relay.scheduler.vllm_queue import PrefixRequestQueue, QueueObserver
from vllm_relay.scheduler.warm_up import WarmUp


@dataclass(eq=False)
class FakeRequest:
    """What the queue asks a vLLM Request."""

    request_id: str
    chain: tuple[bytes, ...] = ()
    priority: int = 0
    status: RequestStatus = RequestStatus.WAITING
    needs: str | None = None
    arrival_time: float = 0.0

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
        self.missing: set[str] = set()
        self.log = Log()
        self.queue = PrefixRequestQueue(
            by_priority,
            lambda request: request.chain,
            lambda: TenantLanes(
                lambda: Lanes(
                    PrefixOrder(self.resident.__contains__),
                    WarmUp(self.resident.__contains__, max_hold_s),
                    OvertakeLimit(1e9, max_overtakes),
                ),
                lambda request: None,
                Shares(1),
            ),
            max_hold_s,
            self.log,
            lambda: lambda request: request.needs in self.missing,
            clock=lambda: self.now_s,
        )

    def add(self, *requests: Any) -> None:
        for request in requests:
            self.queue.add_request(request)

    def schedule(self, blocked: tuple[Any, ...] = (), room: int = 10**9) -> list[str]:
        """One scan as vLLM's: what is blocked is popped, and given back in reverse."""
        self.queue.retry_blocked()
        ran, skipped = [], []
        self.offered: list[str] = []
        while self.queue and len(ran) < room:
            request: Any = self.queue.peek_request()
            assert self.queue.pop_request() is request
            self.offered.append(request.request_id)
            if request in blocked or request.needs in self.missing:
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


def test_blocked_requests_are_offered_again_when_they_are_not() -> None:
    setup = Setup(max_hold_s=1e9)
    adapter = requests("a1", "a2", "b1", needs="adapter")
    grammar = requests("a3", needs="grammar")
    free = requests("c1", "c2")
    setup.add(*adapter, *grammar, *free)
    setup.missing = {"adapter", "grammar"}
    assert setup.schedule() == ["c1"]
    assert sorted(setup.offered) == ["a1", "a2", "a3", "b1", "c1"]
    setup.resident.update(free[0].chain)
    assert setup.schedule() == ["c2"]
    assert setup.offered == ["c2"]
    setup.missing = {"grammar"}
    assert setup.schedule() == ["a1", "b1"]  # and "a2" is held as ever
    assert (setup.queue.held_requests, len(setup.queue)) == (1, 2)
    assert (setup.queue.leading_requests, setup.queue.blocked_requests) == (1, 1)
    setup.missing = set()
    setup.resident.update(adapter[0].chain)
    assert setup.schedule() == ["a2", "a3"]
    assert len(setup.queue) == 0


def test_blocked_requests_may_be_aborted() -> None:
    setup = Setup()
    first, second = both = requests("a1", "a2", needs="adapter")
    setup.add(*both)
    setup.missing = {"adapter"}
    for _ in range(2):
        assert setup.schedule() == []
    setup.queue.remove_request(first)
    assert set(setup.queue) == {second}
    setup.missing = set()
    assert setup.schedule() == ["a2"]
    for request in both:
        setup.queue.release(request)
        setup.queue.forget(request)
    assert records_of_queue(setup.queue) == 0


def test_nobody_of_a_lower_priority_runs_before_held_requests() -> None:
    setup = Setup(by_priority=True, max_hold_s=1e9)
    leader, sibling = requests("a1", "a2", priority=0)
    [late] = requests("b1", priority=1)
    setup.add(leader, sibling, late)
    assert setup.schedule() == ["a1"]
    setup.resident.update(leader.chain)
    assert setup.schedule() == ["a2", "b1"]
    for request in (leader, sibling, late):
        setup.queue.release(request)
        setup.queue.forget(request)
    assert records_of_queue(setup.queue) == 0


def test_a_request_that_finished_at_once_has_run() -> None:
    setup = Setup()
    [request] = requests("a1")
    setup.add(request)
    assert setup.queue.pop_request() is request
    request.status = RequestStatus.FINISHED_STOPPED
    setup.queue.release(request)
    setup.queue.forget(request)
    assert records_of_queue(setup.queue) == 0
    assert setup.log.uses == 1


def test_a_preempted_session_may_come_back_as_one_that_waits() -> None:
    setup = Setup()
    [session] = requests("a1")
    setup.add(session)
    setup.schedule()
    session.status = RequestStatus.PREEMPTED
    setup.queue.prepend_request(session)
    session.status = RequestStatus.WAITING
    setup.add(session)
    assert list(setup.queue) == [session]
    assert setup.schedule() == ["a1"]


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
    assert records_of_queue(setup.queue) == 0


def test_aborted_requests_leave_nothing() -> None:
    setup = Setup()
    waiting = requests("a1", "a2", "b1")
    setup.add(*waiting)
    stranger = requests("z1")
    for request in waiting:
        request.status = RequestStatus.FINISHED_ABORTED
    setup.queue.remove_requests([*waiting, *stranger])
    assert (len(setup.queue), records_of_queue(setup.queue)) == (0, 0)
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


def test_requests_of_equal_priority_go_by_their_time_of_arrival() -> None:
    setup = Setup(by_priority=True)
    late, early, between = three = requests("a1", "b1", "c1")
    late.arrival_time, early.arrival_time, between.arrival_time = 3.0, 1.0, 2.0
    [urgent] = requests("d1", priority=-1, arrival_time=9.0)
    setup.add(*three, urgent)
    assert list(setup.queue) == [urgent, early, between, late]
    assert setup.schedule() == ["d1", "b1", "c1", "a1"]


def test_the_time_of_arrival_counts_among_prefixes_and_within_one() -> None:
    setup = Setup(by_priority=True)
    a1, b1, a2, b2 = four = requests("a1", "b1", "a2", "b2")
    a1.arrival_time, a2.arrival_time, b1.arrival_time, b2.arrival_time = 4.0, 3.0, 2.0, 1.0
    setup.add(*four)
    assert setup.schedule() == ["b2", "b1", "a2", "a1"]


def test_blocked_requests_come_back_by_their_time_of_arrival() -> None:
    setup = Setup(by_priority=True)
    both = requests("a1", "b1", needs="adapter")
    both[0].arrival_time, both[1].arrival_time = 2.0, 1.0
    setup.add(*both)
    setup.missing = {"adapter"}
    assert setup.schedule() == []
    setup.missing = set()
    assert setup.schedule() == ["b1", "a1"]


def test_without_priorities_requests_go_by_the_order_in_which_they_are_added() -> None:
    setup = Setup()
    first, second = both = requests("a1", "b1")
    first.arrival_time, second.arrival_time = 2.0, 1.0
    setup.add(*both)
    assert list(setup.queue) == [first, second]
    assert setup.schedule() == ["a1", "b1"]


def test_it_is_a_sequence() -> None:
    setup = Setup()
    first, second, third = three = requests("a1", "b1", "c1")
    setup.add(*three)
    assert (setup.queue[0], setup.queue[-1], setup.queue[1:]) == (first, third, [second, third])
    assert list(reversed(setup.queue)) == [third, second, first]
    assert (setup.queue.index(second), setup.queue.count(second)) == (1, 1)
    with pytest.raises(IndexError):
        setup.queue[3]


def test_nobody_is_overtaken_too_often() -> None:
    setup = Setup(max_overtakes=2)
    setup.add(*requests("a1", "b1", "a2"))
    assert setup.schedule(room=1) == ["a1"]
    setup.add(*requests("a3", "a4", "a5", "a6"))
    # two waited with it, and two may come on top
    assert setup.schedule() == ["a2", "a3", "a4", "b1", "a5", "a6"]
    assert setup.queue.overtakes == 3


def test_a_blocked_request_keeps_its_seniority() -> None:
    setup = Setup(max_overtakes=2)
    [blocked] = requests("b1", needs="grammar")
    setup.add(*requests("a1"), blocked)
    setup.missing = {"grammar"}
    assert setup.schedule() == ["a1"]
    for number in range(2, 8):
        setup.add(*requests(f"a{number}"))
        assert setup.schedule() == [f"a{number}"]
    setup.missing = set()
    setup.add(*requests("a8", "a9"))
    assert setup.schedule() == ["b1", "a8", "a9"]


def test_held_requests_do_not_keep_a_lower_priority_for_ever() -> None:
    setup = Setup(by_priority=True, max_hold_s=2.0)
    prefixes = [requests(f"{letter}1", f"{letter}2", priority=0) for letter in "abcdefgh"]
    setup.add(*requests("z1", priority=1))
    waited_s = None
    for number, prefix in enumerate(prefixes):  # before one hold ends, the next one begins
        setup.now_s = 1.5 * number
        setup.add(*prefix)
        if "z1" in setup.schedule():
            waited_s = setup.now_s
            break
    assert waited_s is not None
    assert waited_s <= 4.0


def test_a_prefix_that_always_waits_does_not_make_the_queue_grow() -> None:
    setup = Setup(max_overtakes=0)  # everybody runs by seniority, past the heaps
    setup.add(*requests("a1", "a2"))
    order = setup.queue._classes[0]._lanes[None].order
    for number in range(2000):
        setup.add(FakeRequest(f"u{number}", (b"u%d" % number,)), *requests("a3"))
        setup.schedule(room=2)
    assert len(order._root.queue) < 300
