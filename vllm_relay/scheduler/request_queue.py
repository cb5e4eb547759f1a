# SPDX-License-Identifier: Apache-2.0
"""The queue of waiting requests that takes the place of vLLM's."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request, RequestStatus

from vllm_relay.scheduler.fairness import OvertakeLimit
from vllm_relay.scheduler.order import PrefixOrder


class _Class:
    """Requests of one priority."""

    def __init__(self, order: PrefixOrder[Request], limit: OvertakeLimit | None) -> None:
        self.order = order
        self.limit = limit
        self.preempted: deque[Request] = deque()  # they go on first, as they stopped
        self.by_position: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self.preempted) + len(self.order)


class PrefixRequestQueue(RequestQueue):
    """Waiting requests by priority, and within one priority in the order of `PrefixOrder`.

    It is false while it is not empty if all its requests are held: `len` counts, `bool` says
    whether there is a request to run now.

    Args:
        by_priority: whether `Request.priority` counts, the smallest first.
        chain_of: the chained block hashes under which a request is ordered.
        make_order: an empty order for the requests of one priority.
        make_limit: its limit on overtaking, or None.
        observer: is told when a request begins and ceases to wait.
    """

    def __init__(
        self,
        by_priority: bool,
        chain_of: Callable[[Request], Sequence[bytes]],
        make_order: Callable[[], PrefixOrder[Request]],
        make_limit: Callable[[], OvertakeLimit | None],
        observer: QueueObserver,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._by_priority = by_priority
        self._chain_of = chain_of
        self._make_order = make_order
        self._make_limit = make_limit
        self._observer = observer
        self._clock = clock
        self._classes: dict[int, _Class] = {}
        self._positions: dict[str, int] = {}  # of every request that ever waited and is not done
        self._next_position = 0
        self._chosen: Request | None = None

    @property
    def overtakes(self) -> int:
        """Requests that ran while an older one of their priority waited."""
        return sum(each.limit.total for each in self._classes.values() if each.limit is not None)

    @property
    def held_requests(self) -> int:
        """Requests held until another one has computed their prefix."""
        return sum(each.order.held for each in self._classes.values())

    def release(self, request: Request) -> None:
        """No longer hold the requests that wait for blocks this one was to compute."""
        self._chosen = None
        each = self._classes.get(self._priority(request))
        if each is not None:
            each.order.release(request)

    def forget(self, request: Request) -> None:
        """Drop what is kept about a finished request."""
        self._positions.pop(request.request_id, None)

    def is_empty_of_records(self) -> bool:
        """Whether nothing is kept about any request: so it must be when all are done."""
        return not self._positions and not any(each.by_position for each in self._classes.values())

    def add_request(self, request: Request) -> None:
        self._chosen = None
        each = self._class_of(request)
        position = self._positions.get(request.request_id)
        if position is None:
            position = self._positions[request.request_id] = self._next_position
            self._next_position += 1
        if request.status == RequestStatus.PREEMPTED:
            each.order.release(request)
            each.preempted.appendleft(request)
        else:
            chain = self._chain_of(request)
            each.order.add(request, chain, position)
            each.by_position[position] = request
            if each.limit is not None:
                each.limit.arrive(position)
        self._observer.waits(request, position)

    def peek_request(self) -> Request:
        request = self._choose()
        if request is None:
            raise IndexError("peek from a queue without a request to run")
        return request

    def pop_request(self) -> Request:
        request = self.peek_request()
        self._take_out(request, runs=True)
        return request

    def prepend_request(self, request: Request) -> None:
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.add_request(request)

    def remove_request(self, request: Request) -> None:
        if not self._waits(request):
            raise ValueError(f"request {request.request_id} does not wait")
        self._take_out(request, runs=False)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if self._waits(request):
                self._take_out(request, runs=False)

    def __bool__(self) -> bool:
        return self._choose() is not None

    def __len__(self) -> int:
        return sum(map(len, self._classes.values()))

    def __iter__(self) -> Iterator[Request]:
        """By priority; preempted ones first, the others in the order of their arrival."""
        for priority in sorted(self._classes):
            yield from self._classes[priority].preempted
            yield from self._classes[priority].order

    def _choose(self) -> Request | None:
        if self._chosen is None:
            now_s = self._clock()
            for priority in sorted(self._classes):
                self._chosen = _first_of(self._classes[priority], now_s)
                if self._chosen is not None:
                    break
        return self._chosen

    def _take_out(self, request: Request, runs: bool) -> None:
        self._chosen = None
        each = self._class_of(request)
        position = self._positions[request.request_id]
        if request in each.order:
            # what is popped in a blocked state is set aside and comes back
            if runs and request.status == RequestStatus.WAITING:
                now_s = self._clock()
                each.order.take(request, now_s)
                if each.limit is not None:
                    each.limit.run(position, now_s)
            else:
                each.order.remove(request)
                if each.limit is not None:
                    each.limit.leave(position)
            del each.by_position[position]
        else:
            each.preempted.remove(request)
        self._observer.waits_no_longer(request, position, runs)

    def _waits(self, request: Request) -> bool:
        each = self._classes.get(self._priority(request))
        return each is not None and (request in each.order or request in each.preempted)

    def _class_of(self, request: Request) -> _Class:
        priority = self._priority(request)
        each = self._classes.get(priority)
        if each is None:
            each = self._classes[priority] = _Class(self._make_order(), self._make_limit())
        return each

    def _priority(self, request: Request) -> int:
        return request.priority if self._by_priority else 0


class QueueObserver:
    """Is told which requests wait; `position` is a request's place in the order of arrival."""

    def waits(self, request: Request, position: int) -> None: ...

    def waits_no_longer(self, request: Request, position: int, runs: bool) -> None: ...


def _first_of(each: _Class, now_s: float) -> Request | None:
    if each.preempted:
        return each.preempted[0]
    urgent = each.limit.urgent(now_s) if each.limit is not None else None
    if urgent is not None:
        return each.by_position[urgent]
    return each.order.first(now_s)
