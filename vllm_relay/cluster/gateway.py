# SPDX-License-Identifier: Apache-2.0
"""Where requests go that come one by one, to replicas that come and go: for gateways."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from heapq import heappop, heappush
from itertools import count
from threading import Lock
from typing import Generic, TypeVar

from vllm_relay.arguments import check_count
from vllm_relay.cluster.replica_index import PredictedCaches
from vllm_relay.cluster.requests import BLOCK_SIZE_TOKENS, RoutablePrompt
from vllm_relay.cluster.routing import Router, ServingCosts

Name = TypeVar("Name", bound=Hashable)

MAX_REPLICAS = 1024
DEFAULT_CACHE_TOKENS = 1 << 20

# in tokens: of prompt and answer each counts alike, as in a batch
_TOKENS = ServingCosts(1.0, 1.0)


class RoutedRequest(Generic[Name]):
    """A request on its way.

    Attributes:
        replica: where it goes.
        num_cached_tokens: of its prompt, expected in the cache there.
    """

    def __init__(
        self, gateway: Gateway[Name], number: int, replica: Name, num_cached_tokens: int
    ) -> None:
        self.replica = replica
        self.num_cached_tokens = num_cached_tokens
        self._gateway = gateway
        self._number = number

    def answered(self) -> None:
        """The answer begins: the prompt is computed."""
        self._gateway._answered(self._number)

    def ended(self) -> None:
        """The answer is complete, or none will come; more calls do nothing."""
        self._gateway._ended(self._number)


class Gateway(Generic[Name]):
    """Chooses replicas, see `Router`. Every thread may call it.

    Takes about 200 bytes for each block of 16 tokens that a replica's cache has, when it is full.

    Args:
        replicas: by any names, such as addresses.
        cache_tokens: of each replica's KV cache, where `add` is not told.

    Raises:
        ValueError: `cache_tokens` is no number of tokens, or there are more than `MAX_REPLICAS`.
    """

    def __init__(
        self, replicas: Iterable[Name] = (), *, cache_tokens: int = DEFAULT_CACHE_TOKENS
    ) -> None:
        check_count("cache_tokens", cache_tokens)
        self._num_blocks = _blocks(cache_tokens)
        self._caches = PredictedCaches([self._num_blocks] * MAX_REPLICAS)
        self._router = Router(self._caches, _TOKENS, BLOCK_SIZE_TOKENS, MAX_REPLICAS)
        self._places: dict[Name, int] = {}
        self._names: dict[int, Name] = {}
        """By their places."""
        self._free = list(range(MAX_REPLICAS))
        self._requests = count()
        self._lock = Lock()
        for each in replicas:
            self.add(each)

    @property
    def replicas(self) -> list[Name]:
        """That can be had."""
        with self._lock:
            return list(self._places)

    def add(self, replica: Name, cache_tokens: int | None = None) -> None:
        """A replica can be had, its cache empty; one that is known already stays as it is.

        Raises:
            ValueError: there are too many, or `cache_tokens` is no number of tokens.
        """
        if cache_tokens is not None:
            check_count("cache_tokens", cache_tokens)
        num_blocks = self._num_blocks if cache_tokens is None else _blocks(cache_tokens)
        with self._lock:
            if replica in self._places:
                return
            if not self._free:
                raise ValueError(f"replica {replica} given, expected at most {MAX_REPLICAS}")
            place = self._places[replica] = heappop(self._free)
            self._names[place] = replica
            self._caches.resize(place, num_blocks)

    def lost(self, replica: Name) -> None:
        """A replica is gone with its cache and its requests, until it is added again."""
        with self._lock:
            place = self._places.pop(replica, None)
            if place is not None:
                del self._names[place]
                self._router.lost(place)
                heappush(self._free, place)

    def route(
        self, prompt: RoutablePrompt, among: Collection[Name] | None = None
    ) -> RoutedRequest[Name]:
        """Choose a replica for a request, which is on its way there from now on.

        Args:
            among: replicas that it may go to; None for all.

        Raises:
            ValueError: none of them can be had.
        """
        with self._lock:
            places: Collection[int] = self._names
            if among is not None:
                places = [self._places[name] for name in among if name in self._places]
            number = next(self._requests)
            chosen = self._router.route(
                number, prompt.chain, prompt.prompt_tokens, prompt.output_tokens, places
            )
            name = self._names[chosen.replica]
            return RoutedRequest(self, number, name, chosen.num_cached_tokens)

    def load_tokens(self, replica: Name) -> float:
        """That a replica has yet to compute; 0 for one that cannot be had."""
        with self._lock:
            place = self._places.get(replica)
            return 0.0 if place is None else self._router.loads[place]

    def _answered(self, number: int) -> None:
        with self._lock:
            self._router.answered(number)

    def _ended(self, number: int) -> None:
        with self._lock:
            self._router.ended(number)


def _blocks(cache_tokens: int) -> int:
    return max(1, cache_tokens // BLOCK_SIZE_TOKENS)
