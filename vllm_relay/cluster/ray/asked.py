# SPDX-License-Identifier: Apache-2.0
"""A request as the router and whoever asks know it, until its answer is complete."""

from __future__ import annotations

from threading import Lock
from typing import Any, Generic

from vllm_relay.cluster.gateway import Gateway, Name, RoutedRequest
from vllm_relay.cluster.requests import RoutablePrompt

CACHE_TOKENS = "cache_tokens"
"""What replicas tell by this name in `record_replica_metadata`: the size of their KV cache,
None where they have none."""


class Asked(Generic[Name]):
    """A request, for the router: give it to a handle as an argument; replicas get None for it.

    Args:
        prompt: of the request.

    Attributes:
        num_routed: how often a replica was chosen for it.
    """

    def __init__(self, prompt: RoutablePrompt) -> None:
        self.prompt = prompt
        self.num_routed = 0
        self._tried: set[Name] = set()
        self._routed: RoutedRequest[Name] | None = None
        self._is_over = False
        self._lock = Lock()  # Serve's router has a thread of its own

    def route(self, gateway: Gateway[Name], among: set[Name]) -> RoutedRequest[Name]:
        """Choose a replica, another one than before if there is one."""
        with self._lock:
            if self._routed is not None:
                self._routed.ended()
            routed = self._routed = gateway.route(self.prompt, among - self._tried or among)
            self._tried.add(routed.replica)
            self.num_routed += 1
            if self._is_over:
                routed.ended()
            return routed

    def answered(self) -> None:
        """The answer begins."""
        with self._lock:
            if self._routed is not None:
                self._routed.answered()

    def ended(self) -> None:
        """The answer is complete, or nobody waits for it any more."""
        with self._lock:
            self._is_over = True
            if self._routed is not None:
                self._routed.ended()

    def __reduce__(self) -> Any:
        return type(None), ()
