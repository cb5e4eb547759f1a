# SPDX-License-Identifier: Apache-2.0
"""Of requests that share blocks which are not in the cache, one computes them and the others are
held until it has; and which of them a KV connector can load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, TypeVar

from vllm_relay.prefix_cache.chains import BlockName, common_depth

R = TypeVar("R", bound=Hashable)


@dataclass(slots=True)
class _Lead:
    chain: Sequence[BlockName]  # the names of the leader's blocks
    first_block: int
    """Those before it are another one's to compute, or were once held for as long as may be."""
    until_s: float  # when nobody is held any longer
    num_loaded: int
    """How many of its first blocks it was not to compute: in the cache, or to be loaded."""


@dataclass
class WarmUp(Generic[R]):
    """Who computes which blocks now.

    A hold ends when the blocks are in the cache, when `release` is called for the request that was
    to compute them, or after `max_hold_s`; then nobody is held for these blocks until they were
    computed or released.

    Args:
        is_resident: whether a block is in the cache now.
        max_hold_s: seconds; 0 holds nobody.
        is_loadable: whether a KV connector can load a block now.
    """

    is_resident: Callable[[BlockName], bool]
    max_hold_s: float
    is_loadable: Callable[[BlockName], bool] = lambda name: False
    _leads: dict[R, _Lead] = field(default_factory=dict, init=False)
    _by_first_block: dict[BlockName, dict[R, _Lead]] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        """How many compute blocks for others, as far as is known."""
        return len(self._leads)

    def chains(self) -> list[Sequence[BlockName]]:
        """Of those that compute blocks for others."""
        return [lead.chain for lead in self._leads.values()]

    def lead(self, request: R, chain: Sequence[BlockName], now_s: float) -> None:
        """A request begins to compute those of its blocks that are not in the cache."""
        if self.max_hold_s <= 0 or not chain or self.is_resident(chain[-1]):
            return
        first_block = 0
        for other in self._beside(chain):
            common = common_depth(chain, other.chain, len(chain))
            if not self.is_resident(chain[common - 1]):
                first_block = max(first_block, common)
        if first_block < len(chain):
            lead = _Lead(chain, first_block, now_s + self.max_hold_s, self._num_loaded(chain))
            self._leads[request] = lead
            self._by_first_block.setdefault(chain[0], {})[request] = lead

    def release(self, request: R) -> None:
        """Hold nobody any longer for the blocks that this one was to compute."""
        lead = self._leads.pop(request, None)
        if lead is not None:
            beside = self._by_first_block[lead.chain[0]]
            del beside[request]
            if not beside:
                del self._by_first_block[lead.chain[0]]

    def is_held(self, chain: Sequence[BlockName], depth: int, now_s: float) -> bool:
        """Whether all requests whose chains begin as the first `depth` blocks of this one wait for
        blocks that another request computes."""
        if not self._leads:
            return False
        for lead in self._beside(chain):
            if now_s >= lead.until_s:
                continue
            common = common_depth(chain, lead.chain, depth)
            if common <= lead.first_block or self.is_resident(chain[common - 1]):
                continue
            if common <= lead.num_loaded or not self.is_loadable(chain[common - 1]):
                return True
        return False

    def _num_loaded(self, chain: Sequence[BlockName]) -> int:
        """How many blocks there are up to the last one that can be loaded."""
        depths = range(len(chain), 0, -1)
        return next((depth for depth in depths if self.is_loadable(chain[depth - 1])), 0)

    def _beside(self, chain: Sequence[BlockName]) -> list[_Lead]:
        """Who computes blocks that begin as these; those that are done are forgotten."""
        beside = self._by_first_block.get(chain[0])
        if beside is None:
            return []
        done = [each for each, lead in beside.items() if self.is_resident(lead.chain[-1])]
        for request in done:
            self.release(request)
        return list(beside.values())


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
