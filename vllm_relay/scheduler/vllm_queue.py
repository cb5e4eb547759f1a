# SPDX-License-Identifier: Apache-2.0
"""The queue of waiting requests that takes the place of vLLM's."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import overload

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request, RequestStatus

from vllm_relay.prefix_cache.chains import BlockName
from vllm_relay.scheduler.order import Position
from vllm_relay.scheduler.tenants import TenantLanes

# of requests that were popped and do not run; one whose KV cache is being loaded does
_NOT_RUN = (
    RequestStatus.WAITING,
    RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR,
    RequestStatus.WAITING_FOR_STREAMING_REQ,
    RequestStatus.PREEMPTED,
)


class QueueObserver:
    """Is told which requests wait; `position` says how many came before a request."""

    def waits(self, request: Request, position: int) -> None: ...

    def waits_no_longer(self, request: Request, position: int, runs: bool) -> None: ...


@dataclass(eq=False, repr=False)
class PrefixRequestQueue(RequestQueue, Sequence[Request]):
    """Waiting requests by priority, and within one priority in the order of `PrefixOrder`.

    `len` counts, `bool` says whether there is a request to run now. Nobody runs before held
    requests of a higher priority until these have been held for `max_hold_s`.

    vLLM also pops requests that it cannot run yet, and gives them back at the end of the step. What
    was popped is looked at when the queue is used next: by then vLLM has marked those that run.
    Those that are known to be blocked when they are given back are offered again when they are not.

    Args:
        by_priority: whether `Request.priority` counts, the smallest first, and among equal ones
            `Request.arrival_time` before the order in which they are added.
        chain_of: the chained names of blocks under which a waiting request is ordered; without any
            it is held for nobody.
        make_lanes: empty ones for the requests of one priority.
        max_hold_s: how long requests of a lower priority wait for held ones, in seconds.
        observer: is told when a request begins and ceases to wait.
        blocked_now: returns what tells, at this moment, whether a request cannot run.
        goes_first: whether a request comes before the others of its priority, as preempted ones do.
        lacks: whether a request lacks what others compute first; it waits apart, until `offer`.
    """

    by_priority: bool
    chain_of: Callable[[Request], Sequence[BlockName]]
    make_lanes: Callable[[], TenantLanes[Request]]
    max_hold_s: float
    observer: QueueObserver
    blocked_now: Callable[[], Callable[[Request], bool]]
    clock: Callable[[], float] = time.monotonic
    goes_first: Callable[[Request], bool] = lambda request: False
    lacks: Callable[[Request], bool] = lambda request: False
    overtakes: int = field(default=0, init=False)
    """Requests that ran while an older one of their priority waited."""
    _classes: dict[int, TenantLanes[Request]] = field(default_factory=dict, init=False)
    _priorities: list[int] = field(default_factory=list, init=False)  # of the classes, ascending
    _held_since_s: dict[int, float] = field(default_factory=dict, init=False)
    """By priority, since when its held requests keep the lower ones waiting."""
    _positions: dict[Request, int] = field(default_factory=dict, init=False)
    """Of all that ever waited and are not done."""
    _next_position: int = field(default=0, init=False)
    _num_in_classes: int = field(default=0, init=False)
    _set_aside: set[Request] = field(default_factory=set, init=False)  # popped, and did not run
    _blocked: dict[Request, None] = field(default_factory=dict, init=False)
    _lacking: dict[Request, None] = field(default_factory=dict, init=False)
    _popped: Request | None = field(default=None, init=False)
    _chosen: Request | None = field(default=None, init=False)

    @property
    def held_requests(self) -> int:
        """Requests held until another one has computed their prefix."""
        now_s = self.clock()
        return sum(each.num_held(now_s) for each in self._classes.values())

    @property
    def num_offered(self) -> int:
        """How many of the waiting requests can run, or can be held."""
        self._settle()
        return self._num_in_classes

    def offer(self, request: Request) -> None:
        """A request lacks nothing any more."""
        self._settle()
        del self._lacking[request]
        self._offer(request)

    @property
    def leading_requests(self) -> int:
        """Requests for which others are held."""
        now_s = self.clock()
        return sum(each.num_leaders(now_s) for each in self._classes.values())

    @property
    def blocked_requests(self) -> int:
        """Requests that cannot run whoever's turn it is: see `blocked_now`."""
        return len(self._blocked) + len(self._lacking)

    def retry_blocked(self) -> None:
        """Offer blocked requests again that are not blocked any more, and choose anew; before every
        step."""
        self._settle()
        if self._blocked:
            is_blocked = self.blocked_now()
            for request in [each for each in self._blocked if not is_blocked(each)]:
                del self._blocked[request]
                self._put_in_order(request)

    def look_again(self, request: Request) -> None:
        """Blocks of a waiting request have come to be in the cache, or can be loaded."""
        self._settle()
        if each := self._classes.get(self._priority(request)):
            each.look_again(request)

    def release(self, request: Request) -> None:
        """No longer hold the requests that wait for blocks this one was to compute."""
        self._settle()
        priority = self._priority(request)
        if priority in self._classes:
            self._classes[priority].release(request)
            self._drop_if_empty(priority)

    def forget(self, request: Request) -> None:
        """Drop what is kept about a finished request, as soon as it does not wait any more."""
        self._settle()
        if not self._waits(request):
            self._positions.pop(request, None)

    def add_request(self, request: Request) -> None:
        self._settle()
        if request in self._set_aside:
            self._set_aside.discard(request)
        else:
            if self._waits(request):  # a streaming session that was preempted and then stopped
                self.remove_request(request)
            if request not in self._positions:
                self._positions[request] = self._next_position
                self._next_position += 1
            self.observer.waits(request, self._positions[request])
        self._put_in_order(request)

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
        """Take back what was popped: each keeps its place in the order of arrival."""
        self._settle()
        is_blocked = self.blocked_now()
        for request in requests:
            if request in self._set_aside and is_blocked(request):
                self._set_aside.discard(request)
                self._blocked[request] = None
            else:
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
            if self._waits_apart(request):
                self._set_aside.discard(request)
                self._blocked.pop(request, None)
                self._lacking.pop(request, None)
            else:
                self._num_in_classes -= 1
            priority = self._priority(request)
            if priority in self._classes:  # not if it was preempted, and then set aside alone
                self._classes[priority].remove(request)
                self._drop_if_empty(priority)
            self.observer.waits_no_longer(request, self._positions[request], False)
            if request.is_finished():
                del self._positions[request]

    def __bool__(self) -> bool:
        return self._choose() is not None

    def __len__(self) -> int:
        self._settle()
        return self._num_in_classes + len(self._blocked) + len(self._lacking)

    def __iter__(self) -> Iterator[Request]:
        """By priority; preempted ones first, the others in the order of their arrival; at last
        those that cannot run."""
        self._settle()
        for priority in self._priorities:
            yield from self._classes[priority]
        yield from self._blocked
        yield from self._lacking

    @overload
    def __getitem__(self, index: int) -> Request: ...
    @overload
    def __getitem__(self, index: slice) -> list[Request]: ...
    def __getitem__(self, index: int | slice) -> Request | list[Request]:
        """By the order of iteration, at the cost of a sort of all."""
        return list(self)[index]

    def _choose(self) -> Request | None:
        if self._popped is not None or self._chosen is None:
            self._settle()
            now_s = self.clock()
            waited_for: list[int] = []  # priorities whose requests are held, but not any longer
            for priority in self._priorities:
                each = self._classes[priority]
                self._chosen = each.first(now_s)
                if self._chosen is not None:
                    break
                if not each:
                    self._held_since_s.pop(priority, None)
                elif now_s - self._held_since_s.setdefault(priority, now_s) < self.max_hold_s:
                    break
                else:
                    waited_for.append(priority)
            if self._chosen is not None:
                for priority in waited_for:
                    del self._held_since_s[priority]
        return self._chosen

    def _settle(self) -> None:
        """Account for the request that was popped last, and choose anew."""
        request, self._popped, self._chosen = self._popped, None, None
        if request is None:
            return
        self._num_in_classes -= 1
        priority = self._priority(request)
        each = self._classes[priority]
        if request.status in _NOT_RUN:
            each.set_aside(request)
            self._set_aside.add(request)
            return
        self.overtakes += each.run(request, self.clock())
        self._drop_if_empty(priority)
        self.observer.waits_no_longer(request, self._positions[request], True)

    def _position(self, request: Request) -> Position:
        arrival_s = request.arrival_time if self.by_priority else 0.0
        return arrival_s, self._positions.get(request, 0)

    def _put_in_order(self, request: Request) -> None:
        if not self.lacks(request):
            self._offer(request)
            return
        self._lacking[request] = None
        if request.status != RequestStatus.PREEMPTED:
            self._lanes_of(request).add_aside(request)

    def _offer(self, request: Request) -> None:
        each = self._lanes_of(request)
        self._num_in_classes += 1
        if request.status == RequestStatus.PREEMPTED:
            each.add_preempted(request)
        elif self.goes_first(request):
            each.add_first(request)
        else:
            # a request without a chain shares nothing
            chain = self.chain_of(request) or (self._positions[request].to_bytes(8, "big"),)
            each.add(request, chain, self._position(request))

    def _lanes_of(self, request: Request) -> TenantLanes[Request]:
        priority = self._priority(request)
        each = self._classes.get(priority)
        if each is None:
            each = self._classes[priority] = self.make_lanes()
            bisect.insort(self._priorities, priority)
        return each

    def _drop_if_empty(self, priority: int) -> None:
        each = self._classes[priority]
        if not each and not each.num_records():
            del self._classes[priority]
            self._held_since_s.pop(priority, None)
            del self._priorities[bisect.bisect_left(self._priorities, priority)]

    def _waits(self, request: Request) -> bool:
        each = self._classes.get(self._priority(request))
        return self._waits_apart(request) or (each is not None and request in each)

    def _waits_apart(self, request: Request) -> bool:
        return any(request in each for each in (self._set_aside, self._blocked, self._lacking))

    def _priority(self, request: Request) -> int:
        return request.priority if self.by_priority else 0
