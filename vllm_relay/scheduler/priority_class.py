# SPDX-License-Identifier: Apache-2.0
"""Waiting requests of one priority."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from vllm.v1.request import Request

from vllm_relay.scheduler.fairness import OvertakeLimit
from vllm_relay.scheduler.order import BlockName, Position, PrefixOrder


class PriorityClass:
    """Preempted requests, which go on first, and those that have not begun.

    Args:
        order: of those that have not begun.
        limit: on overtaking among them, or None.
    """

    def __init__(self, order: PrefixOrder[Request], limit: OvertakeLimit[Request] | None) -> None:
        self._order = order
        self._limit = limit
        self._preempted: OrderedDict[Request, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._preempted) + len(self._order)

    def __contains__(self, request: Request) -> bool:
        return request in self._order or request in self._preempted

    def __iter__(self) -> Iterator[Request]:
        """Preempted ones first, the others in the order of their arrival."""
        yield from self._preempted
        yield from self._order

    @property
    def is_led(self) -> bool:
        """Whether requests may be held for one that runs."""
        return self._order.is_led

    @property
    def held(self) -> int:
        """Requests held until another one has computed their prefix."""
        return self._order.held

    @property
    def num_leaders(self) -> int:
        """Requests for which others are held."""
        return self._order.num_leaders

    def num_records(self) -> int:
        """How much is kept about requests that do not wait any more, if none waits."""
        return self._order.num_records()

    def first(self, now_s: float) -> Request | None:
        """The request to run next; None if none waits or all are held."""
        if self._preempted:
            return next(iter(self._preempted))
        urgent = self._limit.urgent(now_s) if self._limit is not None else None
        return self._order.first(now_s) if urgent is None else urgent

    def add(self, request: Request, chain: Sequence[BlockName], position: Position) -> None:
        self._order.add(request, chain, position)
        if self._limit is not None:
            self._limit.arrive(request)

    def add_preempted(self, request: Request) -> None:
        """Before all others."""
        self._preempted[request] = None
        self._preempted.move_to_end(request, last=False)

    def run(self, request: Request, now_s: float) -> bool:
        """Take a request out that runs now; returns whether it overtakes one."""
        if request in self._preempted:
            del self._preempted[request]
            return False
        self._order.take(request, now_s)
        return self._limit is not None and self._limit.run(request, now_s)

    def remove(self, request: Request) -> None:
        """Take a request out that does not run."""
        if request in self._preempted:
            del self._preempted[request]
            return
        self._order.remove(request)
        if self._limit is not None:
            self._limit.leave(request)

    def release(self, request: Request) -> None:
        """No longer hold the requests that wait for blocks this one was to compute."""
        self._order.release(request)
