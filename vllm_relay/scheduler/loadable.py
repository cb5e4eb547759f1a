# SPDX-License-Identifier: Apache-2.0
"""Which blocks a KV connector can load for waiting requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, TypeVar

from vllm_relay.prefix_cache.chains import BlockName

R = TypeVar("R", bound=Hashable)

_LIMIT = 16
"""About how many requests the connector is asked in a step, and for how many that wait it may have
something at a time: to be asked costs a look-up, and some connectors keep what they were asked for
until its request runs."""


@dataclass
class LoadableBlocks(Generic[R]):
    """Asks the connector about each request once, as far as there is room; in one step about one of
    those that begin with the same block, since what is found for it counts for all, and may be in
    the cache when the others run.

    Args:
        find: given a request and the names of its blocks, returns those that can be loaded; None if
            the connector does not know yet, and is to be asked again in another step.
    """

    find: Callable[[R, Sequence[BlockName]], Sequence[BlockName] | None]
    _unasked: dict[R, Sequence[BlockName]] = field(default_factory=dict, init=False)
    _found: dict[R, Sequence[BlockName]] = field(default_factory=dict, init=False)
    _found_chains: dict[R, Sequence[BlockName]] = field(default_factory=dict, init=False)
    _names: Counter[BlockName] = field(default_factory=Counter, init=False)

    def __contains__(self, name: BlockName) -> bool:
        return name in self._names

    def __len__(self) -> int:
        """How many requests it keeps something about."""
        return len(self._unasked) + len(self._found)

    def add(self, request: R, chain: Sequence[BlockName]) -> None:
        """A request begins to wait."""
        if chain:
            self._unasked[request] = chain

    def discard(self, request: R) -> None:
        """A request does not wait any more."""
        self._unasked.pop(request, None)
        self._found_chains.pop(request, None)
        for name in self._found.pop(request, ()):
            self._names[name] -= 1
            if not self._names[name]:
                del self._names[name]

    def forget(self) -> None:
        """Nothing is known any more: the connector is asked again."""
        self._unasked = {**self._found_chains, **self._unasked}
        self._found_chains.clear()
        self._found.clear()
        self._names.clear()

    def ask(self) -> Iterator[R]:
        """Yields the requests for which there turns out to be something."""
        first_blocks: set[BlockName] = set()
        for request, chain in list(islice(self._unasked.items(), _LIMIT)):
            if len(self._found) >= _LIMIT:
                return
            del self._unasked[request]
            names = None
            if chain[0] not in first_blocks:
                first_blocks.add(chain[0])
                names = self.find(request, chain)
            if names is None:
                self._unasked[request] = chain  # another time
            elif names:
                self._found[request], self._found_chains[request] = names, chain
                self._names.update(names)
                yield request
