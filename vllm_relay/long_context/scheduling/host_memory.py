# SPDX-License-Identifier: Apache-2.0
"""Who may use how much host memory: requests by the tokens they have, contexts by their bytes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from vllm_relay.long_context.scheduling.context_bytes import (
    ContextBytes,
    bytes_with_parents,
    with_parents,
)

GRANULE_TOKENS = 1024
"""Requests take memory for so many tokens at a time."""


class Reused(NamedTuple):
    """First tokens of a request that a stored context has."""

    context_id: str
    num_tokens: int


class HostMemory:
    """Reservations of host memory; nothing is reserved twice and nothing beyond the capacity.

    Preempted requests keep what they have as long as nobody else needs it. A context counts as
    long as it may be reused, and from then on until the last request that reads it has ended and
    the last context that continues it has left.

    Args:
        capacity_bytes: for everything.
        bytes_per_token: of keys, values and codes, all layers and ranks together.
    """

    def __init__(self, capacity_bytes: int, bytes_per_token: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.bytes_per_token = bytes_per_token
        self._requests: dict[str, int] = {}
        self._preempted: dict[str, int] = {}  # oldest first
        self._contexts: dict[str, ContextBytes] = {}
        self._reused: dict[str, Reused] = {}
        self._read: dict[str, ContextBytes] = {}  # by request

    @property
    def used_bytes(self) -> int:
        requests = sum(self._requests.values()) + sum(self._preempted.values())
        return requests + self.context_bytes

    @property
    def context_bytes(self) -> int:
        return bytes_with_parents([*self._contexts.values(), *self._read.values()])

    def bytes_of_context(self, context_id: str) -> int:
        """Besides what it continues."""
        known = self._contexts.get(context_id)
        return 0 if known is None else known.num_bytes

    def bytes_for(self, num_tokens: int) -> int:
        """Of a request with so many tokens."""
        granules = -(-num_tokens // GRANULE_TOKENS)
        return granules * GRANULE_TOKENS * self.bytes_per_token

    def reserve(self, request_id: str, num_tokens: int) -> list[str] | None:
        """Makes room for so many tokens of a request, without those that it reuses.

        Returns:
            preempted requests that had to give up their memory, the youngest first; None if there
            is not enough even so, and then nothing is changed.
        """
        missing_bytes = self._missing_bytes(request_id, num_tokens)
        room_bytes = self.capacity_bytes - missing_bytes
        dropped: list[str] = []
        if self.used_bytes > room_bytes:
            others = self._other_preempted(request_id)
            if self._bytes_without(others) > room_bytes:
                return None
            while self._bytes_without(dropped) > room_bytes:
                dropped.append(others[len(dropped)])
        for other in dropped:
            self.release(other)
        self._requests[request_id] = self._held_bytes(request_id) + missing_bytes
        self._preempted.pop(request_id, None)
        return dropped

    def contexts_in_the_way(
        self, request_id: str, num_tokens: int, context_ids: Sequence[str]
    ) -> list[str]:
        """Which contexts have to leave before `reserve` makes room: the first ones of `context_ids`
        whose leaving frees memory, but none that the request or a running one reads. Empty if that
        is not enough."""
        readers = (request_id, *self._requests)
        read = with_parents(self._read[each] for each in readers if each in self._read)
        known = [each for each in context_ids if each in self._contexts]
        unread = [each for each in known if self._contexts[each] not in read]
        room_bytes = self.capacity_bytes - self._missing_bytes(request_id, num_tokens)
        others = self._other_preempted(request_id)
        leaving: list[str] = []
        left_bytes = self._bytes_without(others)
        while left_bytes > room_bytes:
            for each in unread:
                bytes_then = self._bytes_without(others, [*leaving, each])
                if bytes_then < left_bytes:  # else it left already, or something continues it
                    break
            else:
                return []
            leaving.append(each)
            left_bytes = bytes_then
        return leaving

    def freed_bytes(self, context_ids: Collection[str]) -> int:
        """What is free at once when these contexts are deleted: nothing of one that a request reads
        or that another one continues."""
        return self.used_bytes - self._bytes_without((), context_ids)

    def preempt(self, request_id: str) -> None:
        """The request gives its memory up when others need it."""
        if request_id in self._requests:
            self._preempted[request_id] = self._requests.pop(request_id)

    def release(self, request_id: str) -> None:
        """The request needs no memory any more."""
        self._requests.pop(request_id, None)
        self._preempted.pop(request_id, None)
        self.reuse(request_id, None)

    def holds(self, request_id: str) -> bool:
        """Whether a request, running or preempted, has memory."""
        return request_id in self._requests or request_id in self._preempted

    def is_alone(self, request_id: str) -> bool:
        """Whether no other request that runs has memory."""
        return not self._requests.keys() - {request_id}

    def reuse(self, request_id: str, reused: Reused | None) -> None:
        """The request begins behind what it reuses, or with its first token."""
        self._reused.pop(request_id, None)
        self._read.pop(request_id, None)
        if reused is not None:
            self._reused[request_id] = reused
            if reused.context_id in self._contexts:
                self._read[request_id] = self._contexts[reused.context_id]

    def reused(self, request_id: str) -> Reused | None:
        """What the request began behind."""
        return self._reused.get(request_id)

    def add_context(self, context_id: str, num_bytes: int, request_id: str) -> None:
        """A request becomes a context, which continues the one that it reads, if there is one."""
        self._contexts[context_id] = ContextBytes(num_bytes, self._read.get(request_id))

    def set_context(self, context_id: str, num_bytes: int) -> None:
        """What a context takes; 0 for none. Always granted: it is there already. If it takes less
        than before, those that read it keep what it took."""
        known = self._contexts.get(context_id)
        if known is not None and num_bytes >= known.num_bytes:
            known.num_bytes = num_bytes
        elif num_bytes:
            now = ContextBytes(num_bytes, None if known is None else known.parent)
            for each in self._contexts.values():
                if known is not None and each.parent is known:
                    each.parent = now
            self._contexts[context_id] = now
        else:
            self._contexts.pop(context_id, None)

    def _held_bytes(self, request_id: str) -> int:
        return self._requests.get(request_id, self._preempted.get(request_id, 0))

    def _missing_bytes(self, request_id: str, num_tokens: int) -> int:
        return max(0, self.bytes_for(num_tokens) - self._held_bytes(request_id))

    def _other_preempted(self, request_id: str) -> list[str]:
        """The youngest first."""
        return [each for each in reversed(self._preempted) if each != request_id]

    def _bytes_without(self, requests: Collection[str], contexts: Collection[str] = ()) -> int:
        """What is used when these have left."""
        held = [*self._requests.items(), *self._preempted.items()]
        left = [self._contexts[each] for each in self._contexts if each not in contexts]
        left += [self._read[each] for each in self._read if each not in requests]
        held_bytes = sum(num_bytes for each, num_bytes in held if each not in requests)
        return held_bytes + bytes_with_parents(left)
