# SPDX-License-Identifier: Apache-2.0
"""Who may use how much host memory: requests by the tokens they have, contexts by their bytes."""

from __future__ import annotations

GRANULE_TOKENS = 1024
"""Requests take memory for so many tokens at a time."""


class HostMemory:
    """Reservations of host memory; nothing is reserved twice and nothing beyond the capacity.

    Preempted requests keep what they have as long as nobody else needs it.

    Args:
        capacity_bytes: for everything.
        bytes_per_token: of keys, values and codes, all layers and ranks together.
    """

    def __init__(self, capacity_bytes: int, bytes_per_token: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.bytes_per_token = bytes_per_token
        self._requests: dict[str, int] = {}
        self._preempted: dict[str, int] = {}  # oldest first
        self._contexts: dict[str, int] = {}

    @property
    def used_bytes(self) -> int:
        return sum(sum(each.values()) for each in (self._requests, self._preempted, self._contexts))

    @property
    def context_bytes(self) -> int:
        return sum(self._contexts.values())

    def bytes_for(self, num_tokens: int) -> int:
        """Of a request with so many tokens."""
        granules = -(-num_tokens // GRANULE_TOKENS)
        return granules * GRANULE_TOKENS * self.bytes_per_token

    def reserve(self, request_id: str, num_tokens: int) -> list[str] | None:
        """Makes room for a request's first `num_tokens` tokens.

        Returns:
            preempted requests that had to give up their memory, the youngest first; None if there
            is not enough even so, and then nothing is changed.
        """
        wanted = self.bytes_for(num_tokens)
        held = self._requests.get(request_id, self._preempted.get(request_id, 0))
        missing = self.used_bytes - held + max(held, wanted) - self.capacity_bytes
        dropped: list[str] = []
        for other in reversed(self._preempted):
            if missing <= 0:
                break
            if other != request_id:
                dropped.append(other)
                missing -= self._preempted[other]
        if missing > 0:
            return None
        for other in dropped:
            del self._preempted[other]
        self._preempted.pop(request_id, None)
        self._requests[request_id] = max(held, wanted)
        return dropped

    def preempt(self, request_id: str) -> None:
        """The request gives its memory up when others need it."""
        if request_id in self._requests:
            self._preempted[request_id] = self._requests.pop(request_id)

    def release(self, request_id: str) -> None:
        """The request needs no memory any more."""
        self._requests.pop(request_id, None)
        self._preempted.pop(request_id, None)

    def holds(self, request_id: str) -> bool:
        """Whether a request, running or preempted, has memory."""
        return request_id in self._requests or request_id in self._preempted

    def set_context(self, context_id: str, num_bytes: int) -> None:
        """What a context takes; 0 for none. Always granted: it is there already."""
        if num_bytes:
            self._contexts[context_id] = num_bytes
        else:
            self._contexts.pop(context_id, None)
