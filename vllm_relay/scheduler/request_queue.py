# SPDX-License-Identifier: Apache-2.0
"""The queue of waiting requests that takes the place of vLLM's."""

from __future__ import annotations

import bisect
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request, RequestStatus

from vllm_relay.scheduler.deferral import Deferral
from vllm_relay.scheduler.fairness import OvertakeLimit
from vllm_relay.scheduler.order import PrefixOrder


class QueueObserver:
    """Is told which requests wait; `position` is a request's place in the order of arrival."""

    def waits(self, request: Request, position: int) -> None: ...

    def waits_no_longer(self, request: Request, position: int, runs: bool) -> None: ...


class _Class:
    """Requests of one priority."""

    def __init__(self, order: PrefixOrder[Request], limit: OvertakeLimit | None) -> None:
        self.order = order
        self.limit = limit
        self.preempted: OrderedDict[Request, None] = OrderedDict()  # they go on first
        self.by_position: dict[int, Request] = {}
        self.deferral: Deferral[Request] = Deferral()

    def __len__(self) -> int:
        return len(self.preempted) + len(self.order) + len(self.deferral)

    def __contains__(self, request: Request) -> bool:
        return request in self.order or request in self.preempted or request in self.deferral

    def first(self, now_s: float) -> Request | None:
        if self.preempted:
            return next(iter(self.preempted))
        urgent = self.limit.urgent(now_s) if self.limit is not None else None
        return self.order.first(now_s) if urgent is None else self.by_position[urgent]


class PrefixRequestQueue(RequestQueue):
    """Waiting requests by priority, and within one priority in the order of `PrefixOrder`.

    It is false while it is not empty if all its requests are held: `len` counts, `bool` says
    whether there is a request to run now.

    vLLM also pops requests that it cannot run yet, and gives them back at the end of the step. What
    was popped is looked at when the queue is used next: by then vLLM has marked those that run.

    Args:
        by_priority: whether `Request.priority` counts, the smallest first.
        chain_of: the chained block hashes under which a waiting request is ordered.
        make_order: an empty order for the requests of one priority.
        make_limit: its limit on overtaking, or None.
        observer: is told when a request begins and ceases to wait.
        reason_of: what a request may be deferred for, if others are then deferred for the same.
    """

    def __init__(
        self,
        by_priority: bool,
        chain_of: Callable[[Request], Sequence[bytes]],
        make_order: Callable[[], PrefixOrder[Request]],
        make_limit: Callable[[], OvertakeLimit | None],
        observer: QueueObserver,
        reason_of: Callable[[Request], Hashable | None] = lambda request: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._by_priority = by_priority
        self._chain_of = chain_of
        self._make_order = make_order
        self._make_limit = make_limit
        self._observer = observer
        self._reason_of = reason_of
        self._clock = clock
        self._classes: dict[int, _Class] = {}
        self._priorities: list[int] = []  # of the classes, ascending
        self._leaders: dict[Request, int] = {}  # they compute a prefix; with their priority
        self._positions: dict[Request, int] = {}  # of all that ever waited and are not done
        self._next_position = 0
        self._count = 0  # of those that wait and are not popped
        self._set_aside: set[Request] = set()  # popped, and did not run
        self._popped: Request | None = None
        self._chosen: Request | None = None
        self.overtakes = 0
        """Requests that ran while an older one of their priority waited."""

    @property
    def held_requests(self) -> int:
        """Requests held until another one has computed their prefix."""
        return sum(self._classes[each].order.held for each in set(self._leaders.values()))

    def release(self, request: Request) -> None:
        """No longer hold the requests that wait for blocks this one was to compute."""
        self._settle()
        priority = self._leaders.pop(request, None)
        if priority is not None:
            self._classes[priority].order.release(request)
            self._drop_if_empty(priority)

    def forget(self, request: Request) -> None:
        """Drop what is kept about a finished request, as soon as it does not wait any more."""
        self._settle()
        if not self._waits(request):
            self._positions.pop(request, None)

    def num_records(self) -> int:
        """How much is kept about requests: nothing when all are done."""
        kept = len(self._positions) + len(self._set_aside) + (self._popped is not None)
        return kept + sum(each.order.num_records() for each in self._classes.values())

    def add_request(self, request: Request) -> None:
        self.release(request)
        self._count += 1
        each = self._class_of(request)
        position = self._positions.get(request)
        if position is None:
            position = self._positions[request] = self._next_position
            self._next_position += 1
        was_deferred = request in self._set_aside
        if was_deferred:
            self._set_aside.discard(request)
        else:
            self._observer.waits(request, position)
        if request.status == RequestStatus.PREEMPTED:
            each.preempted[request] = None
            each.preempted.move_to_end(request, last=False)
            return
        reason = self._reason_of(request) if was_deferred else None
        if reason is None or each.deferral.tries_again(request, reason):
            self._put_in_order(each, request)

    def _put_in_order(self, each: _Class, request: Request) -> None:
        position = self._positions[request]
        # without a full block it shares nothing
        chain = self._chain_of(request) or (position.to_bytes(8, "big"),)
        each.order.add(request, chain, position)
        each.by_position[position] = request
        if each.limit is not None:
            each.limit.arrive(position)

    def peek_request(self) -> Request:
        request = self._choose()
        if request is None:
            raise IndexError("peek from a queue without a request to run")
        return request

    def pop_request(self) -> Request:
        self._popped = self.peek_request()
        return self._popped

    def prepend_request(self, request: Request) -> None:
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Take requests back; vLLM gives the one that it popped last first."""
        given = list(requests)
        # preempted ones go to the front one by one; of the others the first popped is to come first
        for request in given:
            if request.status == RequestStatus.PREEMPTED:
                self.add_request(request)
        for request in reversed(given):
            if request.status != RequestStatus.PREEMPTED:
                self.add_request(request)

    def remove_request(self, request: Request) -> None:
        self._settle()
        if not self._waits(request):
            raise ValueError(f"request {request.request_id} does not wait")
        self.remove_requests([request])

    def remove_requests(self, requests: Iterable[Request]) -> None:
        self._settle()
        for request in requests:
            if not self._waits(request):
                continue
            self._leave(request)
            self._observer.waits_no_longer(request, self._positions[request], False)
            if request.is_finished():
                del self._positions[request]

    def __bool__(self) -> bool:
        return self._choose() is not None

    def __len__(self) -> int:
        self._settle()
        return self._count

    def __iter__(self) -> Iterator[Request]:
        """By priority; preempted ones first, deferred ones last."""
        self._settle()
        for priority in self._priorities:
            yield from self._classes[priority].preempted
            yield from self._classes[priority].order
            yield from self._classes[priority].deferral

    def _choose(self) -> Request | None:
        if self._popped is not None or self._chosen is None:
            self._settle()
            now_s = self._clock()
            for priority in self._priorities:
                self._chosen = self._classes[priority].first(now_s)
                if self._chosen is not None:
                    break
        return self._chosen

    def _settle(self) -> None:
        """Account for the request that was popped last, and choose anew."""
        request, self._popped, self._chosen = self._popped, None, None
        if request is None:
            return
        # one whose KV cache is being loaded computes its prefix, too
        runs = request.status in (RequestStatus.RUNNING, RequestStatus.WAITING_FOR_REMOTE_KVS)
        self._take_out(request, runs)
        if runs:
            self._observer.waits_no_longer(request, self._positions[request], True)
        else:
            self._set_aside.add(request)

    def _leave(self, request: Request) -> None:
        deferral = self._class_of(request).deferral
        if request in deferral:
            deferral.remove(request)
            self._count -= 1
            self._drop_if_empty(self._priority(request))
            return
        if request in self._set_aside:
            self._set_aside.discard(request)
        else:
            self._take_out(request, runs=False)
        self._let_those_behind_try(request)

    def _take_out(self, request: Request, runs: bool) -> None:
        priority = self._priority(request)
        each = self._classes[priority]
        position = self._positions[request]
        self._count -= 1
        if request in each.preempted:
            del each.preempted[request]
        elif runs:
            now_s = self._clock()
            if each.order.take(request, now_s):
                self._leaders[request] = priority
            if each.limit is not None:
                self.overtakes += each.limit.run(position, now_s)
            del each.by_position[position]
        else:
            each.order.remove(request)
            if each.limit is not None:
                each.limit.leave(position)
            del each.by_position[position]
        if runs:
            self._let_those_behind_try(request)
        self._drop_if_empty(priority)

    def _let_those_behind_try(self, request: Request) -> None:
        """Once one deferred request runs, or gives up, others for the same reason are offered."""
        each, reason = self._classes.get(self._priority(request)), self._reason_of(request)
        if each is not None and reason is not None:
            for other in each.deferral.release(reason):
                self._put_in_order(each, other)

    def _drop_if_empty(self, priority: int) -> None:
        each = self._classes[priority]
        if not each and not each.order.num_records():
            del self._classes[priority]
            del self._priorities[bisect.bisect_left(self._priorities, priority)]

    def _waits(self, request: Request) -> bool:
        if request in self._set_aside:
            return True
        each = self._classes.get(self._priority(request))
        return each is not None and request in each

    def _class_of(self, request: Request) -> _Class:
        priority = self._priority(request)
        each = self._classes.get(priority)
        if each is None:
            each = self._classes[priority] = _Class(self._make_order(), self._make_limit())
            bisect.insort(self._priorities, priority)
        return each

    def _priority(self, request: Request) -> int:
        return request.priority if self._by_priority else 0
