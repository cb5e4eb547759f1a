# SPDX-License-Identifier: Apache-2.0
"""Which requests wait for which modules.

A request is listed under one of the modules that it lacks, the one that the fewest wait for, and is
looked at again when that is there. So what happens costs as much as it concerns, however many wait.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from vllm_relay.ranked import Ranked

R = TypeVar("R", bound=Hashable)

Rank = tuple[Any, ...]
"""What is smaller comes first."""


@dataclass(eq=False)
class _Waiter(Generic[R]):
    keys: Sequence[bytes]  # the names of all its modules
    rank: Rank
    listed: bytes  # the name of the one it is listed under


class WaitingRequests(Generic[R]):
    """`has` tells whether a module of a request, by its place in it, is there now."""

    def __init__(self, has: Callable[[R, int], bool]) -> None:
        self._has = has
        self._waiters: dict[R, _Waiter[R]] = {}
        self._ranked: Ranked[R] = Ranked()
        self._lists: dict[bytes, Ranked[R]] = {}
        self._looked_at: Ranked[bytes] = Ranked()  # modules whose list is gone through
        self._wanted: dict[bytes, tuple[R, int]] = {}
        self._computed: set[bytes] = set()  # by somebody, and not there yet

    def __contains__(self, request: R) -> bool:
        return request in self._waiters

    def first(self) -> R | None:
        """The one of the smallest rank."""
        return self._ranked.first()

    def add(self, request: R, keys: Sequence[bytes], rank: Rank) -> bool:
        """Let a request wait, if it lacks a module; returns whether it does. `keys` are the names
        of its modules, in their order in the request."""
        missing = [index for index in range(len(keys)) if not self._has(request, index)]
        if not missing:
            self.discard(request)
            return False
        for index in missing:
            if keys[index] not in self._computed:
                self._wanted.setdefault(keys[index], (request, index))
        if request not in self._waiters:
            self._ranked.add(request, rank)
        else:
            self._take_off(request)
        self._waiters[request] = _Waiter(keys, rank, b"")
        self._list(request, [keys[index] for index in missing])
        return True

    def _list(self, request: R, missing: list[bytes]) -> None:
        waiter = self._waiters[request]
        waiter.listed = min(missing, key=lambda key: len(self._lists.get(key, ())))
        self._lists.setdefault(waiter.listed, Ranked()).add(request, waiter.rank)

    def discard(self, request: R) -> None:
        """A request waits no longer."""
        if request in self._waiters:
            self._take_off(request)
            del self._waiters[request]
            self._ranked.discard(request)
            if not self._waiters:
                self._wanted.clear()

    def arrived(self, key: bytes) -> None:
        """A module is there, or will not be: those listed under it are to be looked at again."""
        self._wanted.pop(key, None)
        self._computed.discard(key)
        self._look_at(key)

    def take_able(self, limit: int, max_in_vain: int) -> list[R]:
        """Of those that are to be looked at again, so many that lack nothing: they wait no longer.
        At `max_in_vain` others it looks besides."""
        able: list[R] = []
        looked_at = 0
        while len(able) < limit and looked_at - len(able) < max_in_vain:
            looked_at += 1
            key = self._looked_at.first()
            if key is None:
                break
            request = self._lists[key].first()
            assert request is not None
            if not self.still_lacks(request):
                able.append(request)
            elif self._waiters[request].listed == key:
                self._looked_at.discard(key)  # it is gone again
                continue
            self._look_at(key)
        return able

    def still_lacks(self, request: R) -> bool:
        """Look at a waiting request again; if it lacks nothing, it waits no longer."""
        waiter = self._waiters[request]
        known = [key for key in waiter.keys if key in self._wanted or key in self._computed]
        if not known:
            return self.add(request, waiter.keys, waiter.rank)
        self._take_off(request)
        self._list(request, known)
        return True

    def missing(self, request: R) -> list[int]:
        """The places of the modules that a waiting request lacks."""
        return [
            index
            for index in range(len(self._waiters[request].keys))
            if not self._has(request, index)
        ]

    def wanted(self) -> tuple[R, int] | None:
        """A request and the place of one of its modules, which has been wanted longest and that
        nobody computes yet."""
        while self._wanted:
            key, (request, index) = next(iter(self._wanted.items()))
            if request not in self._waiters and key in self._lists:
                other = self._lists[key].first()
                assert other is not None
                request, index = other, self._waiters[other].keys.index(key)
            if request in self._waiters and not self._has(request, index):
                return request, index
            self.arrived(key)
        return None

    def computed(self, key: bytes) -> None:
        """Somebody computes a module, until it has `arrived`."""
        self._wanted.pop(key, None)
        self._computed.add(key)

    def postpone(self, key: bytes) -> None:
        """Let `wanted` name another module before this one."""
        self._wanted[key] = self._wanted.pop(key)

    def _look_at(self, key: bytes) -> None:
        """Give a list its place among those that are gone through: that of its first request."""
        listed = self._lists.get(key)
        request = None if listed is None else listed.first()
        if request is None:
            self._looked_at.discard(key)
        else:
            self._looked_at.add(key, self._waiters[request].rank)

    def _take_off(self, request: R) -> None:
        key = self._waiters[request].listed
        listed = self._lists[key]
        listed.discard(request)
        if not listed:
            del self._lists[key]
            self._looked_at.discard(key)
