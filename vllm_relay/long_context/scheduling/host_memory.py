# SPDX-License-Identifier: Apache-2.0
"""Who may use how much host memory: requests by the tokens they have, contexts by their bytes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vllm_relay.long_context.scheduling.catalog import (
    ContextCatalog,
    ContextRecord,
    HeldMemory,
    with_parents,
)

GRANULE_TOKENS = 1024
"""Requests take memory for so many tokens at a time."""


class Reused(NamedTuple):
    """First tokens of a request that a stored context has."""

    context_id: str
    num_tokens: int


@dataclass(frozen=True)
class _Reading:
    """What a request reads, and in whose memory; no record: the context was not known."""

    reused: Reused
    record: ContextRecord | None
    held: frozenset[HeldMemory]


class HostMemory:
    """Reservations of host memory; nothing is reserved twice and nothing beyond the capacity.

    Preempted requests keep what they have as long as nobody else needs it. A context counts as
    long as it may be reused, and from then on until the last request that reads it has ended and
    the last context that continues it has left.

    Args:
        capacity_bytes: for everything.
        bytes_per_token: of keys, values and codes, all layers and ranks together.
        catalog: of the contexts.
    """

    def __init__(self, capacity_bytes: int, bytes_per_token: int, catalog: ContextCatalog) -> None:
        self.capacity_bytes = capacity_bytes
        self.bytes_per_token = bytes_per_token
        self._catalog = catalog
        self._requests: dict[str, int] = {}
        self._preempted: dict[str, int] = {}  # oldest first
        self._reading: dict[str, _Reading] = {}  # by request

    @property
    def used_bytes(self) -> int:
        return self._bytes_without(())

    @property
    def context_bytes(self) -> int:
        return self.used_bytes - sum(self._requests.values()) - sum(self._preempted.values())

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
        self, request_id: str, num_tokens: int, contexts: Sequence[ContextRecord]
    ) -> list[ContextRecord]:
        """Which contexts have to leave before `reserve` makes room: the first ones of `contexts`
        whose leaving frees memory, but none that the request or a running one reads. Empty if that
        is not enough."""
        readers = (request_id, *self._requests)
        read = {self._reading[each].record for each in readers if each in self._reading}
        kept = with_parents(each for each in read if each is not None)
        unread = [each for each in contexts if each not in kept]
        room_bytes = self.capacity_bytes - self._missing_bytes(request_id, num_tokens)
        others = self._other_preempted(request_id)
        leaving: list[ContextRecord] = []
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

    def freed_bytes(self, contexts: Collection[ContextRecord]) -> int:
        """What is free at once when these contexts are deleted: nothing of one that a request reads
        or that another one continues."""
        return self.used_bytes - self._bytes_without((), contexts)

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
        self._reading.pop(request_id, None)
        if reused is not None:
            record = self._catalog.get(reused.context_id)
            held = frozenset(each.memory for each in with_parents([record] if record else []))
            self._reading[request_id] = _Reading(reused, record, held)

    def reused(self, request_id: str) -> Reused | None:
        """What the request began behind."""
        reading = self._reading.get(request_id)
        return None if reading is None else reading.reused

    def record_read(self, request_id: str) -> ContextRecord | None:
        """The context that the request reads, which may have been deleted."""
        reading = self._reading.get(request_id)
        return None if reading is None else reading.record

    def _held_bytes(self, request_id: str) -> int:
        return self._requests.get(request_id, self._preempted.get(request_id, 0))

    def _missing_bytes(self, request_id: str, num_tokens: int) -> int:
        return max(0, self.bytes_for(num_tokens) - self._held_bytes(request_id))

    def _other_preempted(self, request_id: str) -> list[str]:
        """The youngest first."""
        return [each for each in reversed(self._preempted) if each != request_id]

    def _bytes_without(
        self, requests: Collection[str], contexts: Collection[ContextRecord] = ()
    ) -> int:
        """What is used when these have left."""
        left = (each for each in self._catalog if each not in contexts)
        memory = {each.memory for each in with_parents(left)}
        for request_id, reading in self._reading.items():
            if request_id not in requests:
                memory |= reading.held
        held = [*self._requests.items(), *self._preempted.items()]
        held_bytes = sum(num_bytes for each, num_bytes in held if each not in requests)
        return held_bytes + sum(each.num_bytes for each in memory)
