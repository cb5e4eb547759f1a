# SPDX-License-Identifier: Apache-2.0
"""Waiting requests of one priority and tenant: who goes first, and everybody else, under one limit
on overtaking."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from vllm_relay.prefix_cache.chains import BlockName
from vllm_relay.ranked import Ranked
from vllm_relay.scheduler.fairness import OvertakeLimit
from vllm_relay.scheduler.order import Position, PrefixOrder
from vllm_relay.scheduler.warm_up import WarmUp

R = TypeVar("R", bound=Hashable)


@dataclass
class Lanes(Generic[R]):
    """
    Args:
        order: of those that wait for their turn.
        warm_up: who computes blocks for others.
        limit: on overtaking.
    """

    order: PrefixOrder[R]
    warm_up: WarmUp[R]
    limit: OvertakeLimit[R]
    _first: dict[R, None] = field(default_factory=dict, init=False)  # the last goes first
    _later: dict[R, tuple[Sequence[BlockName], Position]] = field(default_factory=dict, init=False)
    """Those that arrived too late to overtake everybody who waits."""
    _next: Ranked[R] = field(default_factory=Ranked, init=False)
    """The same, by their numbers."""

    def __len__(self) -> int:
        return len(self._first) + len(self.order) + len(self._later)

    def __contains__(self, request: R) -> bool:
        return any(request in each for each in (self._first, self.order, self._later))

    def __iter__(self) -> Iterator[R]:
        """Those that go first, then the others in the order of arrival."""
        yield from reversed(self._first)
        yield from self.order
        yield from self._later

    def num_held(self, now_s: float) -> int:
        """How many are held until another one has computed their prefix."""
        return self.order.num_held(self.warm_up.chains(), self._is_held(now_s))

    def num_leaders(self, now_s: float) -> int:
        """For how many of those that run others are held."""
        is_held = self._is_held(now_s)
        return sum(self.order.num_held([chain], is_held) > 0 for chain in self.warm_up.chains())

    def num_records(self) -> int:
        """How much is kept about requests that do not wait any more, if none waits."""
        return len(self.warm_up) + len(self.limit)

    def first(self, now_s: float) -> R | None:
        """The request to run next; None if none waits or all are held."""
        while (later := self._next.first()) is not None and self._is_within(later):
            self._next.discard(later)
            self.order.add(later, *self._later.pop(later))
        found = next(reversed(self._first), None)
        if found is None:
            found = self.order.first(
                self._is_held(now_s), lambda request: self.limit.is_late(request, now_s)
            )
        if found is None or self._is_within(found):
            return found
        return self.limit.tightest()

    def add(self, request: R, chain: Sequence[BlockName], position: Position) -> None:
        """Let a request wait for its turn; `chain` are the names of its blocks."""
        self.warm_up.release(request)
        number = self.limit.arrive(request)
        if self.limit.is_within(number):
            self.order.add(request, chain, position)
        else:
            self._later[request] = chain, position
            self._next.add(request, number)

    def look_again(self, request: R) -> None:
        """Blocks of a waiting request have come to be in the cache."""
        if request in self.order:
            self.order.look_again(request)

    def add_first(self, request: R) -> None:
        """Let a request wait that goes before the others, as far as the limit allows; the last one
        added is the first."""
        self.limit.arrive(request)
        self._first[request] = None

    def add_aside(self, request: R) -> None:
        """Let a request wait that cannot run yet. It has a place in the order of arrival from now
        on, and takes it when it is added."""
        self.limit.arrive_aside(request)

    def run(self, request: R, now_s: float) -> bool:
        """Take a request out that runs now; returns whether it overtakes one."""
        if request in self.order:
            self.warm_up.lead(request, self.order.chain(request), now_s)
            self.order.take(request)
        else:
            self._take_out(request)
        return self.limit.run(request, now_s)

    def set_aside(self, request: R) -> None:
        """Take a request out that cannot run now, though it was its turn."""
        self._take_out(request)
        self.limit.set_aside(request)

    def remove(self, request: R) -> None:
        """Take a request out that does not run; one that was set aside does not come back."""
        if request in self:
            self._take_out(request)
        self.limit.leave(request)

    def release(self, request: R) -> None:
        """No longer hold the requests that wait for blocks this one was to compute."""
        self.warm_up.release(request)

    def _take_out(self, request: R) -> None:
        if request in self.order:
            self.order.remove(request)
        elif request in self._first:
            del self._first[request]
        else:
            del self._later[request]
            self._next.discard(request)

    def _is_within(self, request: R) -> bool:
        return self.limit.is_within(self.limit.number(request))

    def _is_held(self, now_s: float) -> Callable[[Sequence[BlockName], int], bool]:
        return lambda chain, depth: self.warm_up.is_held(chain, depth, now_s)
