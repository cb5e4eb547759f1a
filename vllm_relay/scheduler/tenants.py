# SPDX-License-Identifier: Apache-2.0
"""The waiting requests of one priority: who goes on, and the lanes of each tenant, of whom all are
one where they have no shares; with shares, they use equally many tokens.

Deficit round robin (Shreedhar and Varghese, 1995), used over an order by prefixes as in "Locality-
aware Fair Scheduling in LLM Serving" (Cao et al., 2025).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from vllm_relay.prefix_cache.chains import BlockName
from vllm_relay.scheduler.lanes import Lanes
from vllm_relay.scheduler.order import Position

R = TypeVar("R", bound=Hashable)


_MAX_TENANTS = 10_000
"""Of how many, those that were charged last, shares are known."""


@dataclass
class Shares:
    """Who has used how much of a round, in which each may use `round_tokens`. docs/scheduler.md
    ("Tenants") bounds by how much their shares differ."""

    round_tokens: int
    _left_tokens: OrderedDict[Hashable, int] = field(default_factory=OrderedDict, init=False)

    def may_run(self, tenant: Hashable) -> bool:
        """Whether a tenant has not used its tokens of this round yet."""
        return self._left_tokens.get(tenant, self.round_tokens) > 0

    def charge(self, tenant: Hashable, tokens: int) -> None:
        """A tenant has used tokens, perhaps more than it had."""
        if tokens:
            self._left_tokens[tenant] = self._left_tokens.pop(tenant, self.round_tokens) - tokens
            if len(self._left_tokens) > _MAX_TENANTS:
                self._left_tokens.popitem(last=False)

    def go_on_to(self, tenants: Iterable[Hashable]) -> None:
        """Begin new rounds, in each of which every tenant is given a round's tokens and none has
        more, until one of these may run."""
        rounds = min(-self._left_tokens.get(each, 0) // self.round_tokens + 1 for each in tenants)
        for tenant, left in list(self._left_tokens.items()):
            self._left_tokens[tenant] = left + rounds * self.round_tokens
            if self._left_tokens[tenant] >= self.round_tokens:
                del self._left_tokens[tenant]


@dataclass
class TenantLanes(Generic[R]):
    """Preempted requests have had their turn, and go on before all others; these wait in lanes of
    their tenant. Limits on overtaking hold within what it asks.

    Args:
        make_lanes: empty ones, of a tenant.
        tenant_of: whose request one is; None is a tenant, too.
        shares: of all priorities.
    """

    make_lanes: Callable[[], Lanes[R]]
    tenant_of: Callable[[R], Hashable]
    shares: Shares
    _lanes: OrderedDict[Hashable, Lanes[R]] = field(default_factory=OrderedDict, init=False)
    """By tenant; the one whose turn it is comes first."""
    _preempted: dict[R, None] = field(default_factory=dict, init=False)  # the last goes on first
    _first: dict[R, None] = field(default_factory=dict, init=False)  # likewise
    _size: int = field(default=0, init=False)

    def __len__(self) -> int:
        return self._size

    def __contains__(self, request: R) -> bool:
        lanes = self._lanes.get(self.tenant_of(request), ())
        return request in self._preempted or request in lanes

    def __iter__(self) -> Iterator[R]:
        """Preempted ones first, then tenant by tenant."""
        yield from reversed(self._preempted)
        for lanes in self._lanes.values():
            yield from lanes

    def num_held(self, now_s: float) -> int:
        return sum(lanes.num_held(now_s) for lanes in self._lanes.values())

    def num_leaders(self, now_s: float) -> int:
        return sum(lanes.num_leaders(now_s) for lanes in self._lanes.values())

    def num_records(self) -> int:
        return sum(lanes.num_records() for lanes in self._lanes.values())

    def first(self, now_s: float) -> R | None:
        """The request to run next; None if none waits or all are held."""
        if self._preempted:
            return next(reversed(self._preempted))
        if self._first:  # computed for one that waits, whoever's turn it is
            return self._of(next(reversed(self._first))).first(now_s)
        found: dict[Hashable, R] = {}
        for _ in range(len(self._lanes)):
            tenant, lanes = next(iter(self._lanes.items()))
            request = lanes.first(now_s) if lanes else None
            if request is not None:
                if self.shares.may_run(tenant):
                    return request
                found[tenant] = request
            self._lanes.move_to_end(tenant)
        if not found:
            return None
        self.shares.go_on_to(found)
        tenant = next(filter(self.shares.may_run, found))
        self._lanes.move_to_end(tenant, last=False)
        return found[tenant]

    def add(self, request: R, chain: Sequence[BlockName], position: Position) -> None:
        self._of(request).add(request, chain, position)
        self._size += 1

    def look_again(self, request: R) -> None:
        if self.tenant_of(request) in self._lanes:
            self._of(request).look_again(request)

    def add_first(self, request: R) -> None:
        self._of(request).add_first(request)
        self._first[request] = None
        self._size += 1

    def add_aside(self, request: R) -> None:
        self._of(request).add_aside(request)

    def add_preempted(self, request: R) -> None:
        """Let a request that had its turn go on before all others."""
        self.release(request)
        self._preempted[request] = None
        self._size += 1

    def run(self, request: R, now_s: float) -> bool:
        return not self._took_preempted(request) and self._of(request).run(request, now_s)

    def set_aside(self, request: R) -> None:
        if not self._took_preempted(request):
            self._of(request).set_aside(request)

    def remove(self, request: R) -> None:
        if request not in self or not self._took_preempted(request):
            self._of(request).remove(request)
        self._drop_if_empty(request)

    def release(self, request: R) -> None:
        if self.tenant_of(request) in self._lanes:
            self._of(request).release(request)
            self._drop_if_empty(request)

    def _of(self, request: R) -> Lanes[R]:
        tenant = self.tenant_of(request)
        if tenant not in self._lanes:
            self._lanes[tenant] = self.make_lanes()
        return self._lanes[tenant]

    def _took_preempted(self, request: R) -> bool:
        """Take out a request that waits, if it was preempted; else its lanes are to."""
        self._first.pop(request, None)
        self._size -= 1
        if request not in self._preempted:
            return False
        del self._preempted[request]
        return True

    def _drop_if_empty(self, request: R) -> None:
        tenant = self.tenant_of(request)
        lanes = self._lanes.get(tenant)
        if lanes is not None and not lanes and not lanes.num_records():
            del self._lanes[tenant]
