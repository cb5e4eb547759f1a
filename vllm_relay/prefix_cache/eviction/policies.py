# SPDX-License-Identifier: Apache-2.0
"""How long a policy keeps a free block of the prefix cache.

A prompt frees its blocks last first, and whoever needs or used a block needs or used all before it.
So of the blocks of a prompt the deepest is freed first, needed last and used least, and leaves
first: no block leaves before the free ones that follow it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable
from typing import Literal

from vllm_relay.prefix_cache.eviction.next_use import NextUse

Worth = tuple[float, ...]


class EvictionPolicy(ABC):
    """Says which blocks leave after those that were used longest ago, and in which order."""

    @abstractmethod
    def worth(self, key: bytes) -> Worth | None:
        """None: the block leaves by LRU. Others leave after all such, the least worth first, and
        of equals the deepest in its prompt.

        What a free block is worth may grow at any time, and shrinks only when a request waits no
        longer that needed it.
        """

    def on_use(self, keys: Iterable[bytes]) -> None:  # noqa: B027
        """A request that needs these blocks is admitted."""

    def on_evict(self, key: bytes) -> None:  # noqa: B027
        """The last free block with this key, which has a worth, is given to a request."""


class Queue(EvictionPolicy):
    """Blocks that no waiting request needs, by LRU; then the block that is needed last."""

    def __init__(self, next_use: NextUse) -> None:
        self._next_use = next_use.next_use

    def worth(self, key: bytes) -> Worth | None:
        rank = self._next_use(key)
        return None if rank is None else tuple([-each for each in rank])


class Gdsf(EvictionPolicy):
    """GreedyDual-Size-Frequency: the smallest age + uses at the time of its last use, as all blocks
    have the same size and the same cost.

    The age is the value of the last evicted block, so that what was popular long ago leaves too.

    Args:
        max_keys: of how many blocks, those that were used last, uses are known.
    """

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._age = 0
        self._uses: OrderedDict[bytes, tuple[int, int]] = OrderedDict()  # uses and value

    def worth(self, key: bytes) -> Worth:
        if key not in self._uses:
            self.on_use([key])
        return (self._uses[key][1],)

    def on_use(self, keys: Iterable[bytes]) -> None:
        known, age = self._uses, self._age
        for key in keys:
            uses = known.pop(key, (0, 0))[0] + 1
            known[key] = (uses, age + uses)
        while len(known) > self._max_keys:
            known.popitem(last=False)

    def on_evict(self, key: bytes) -> None:
        self._age = max(self._age, self._uses.pop(key)[1])


def make_policy(name: Literal["queue", "gdsf"], next_use: NextUse, blocks: int) -> EvictionPolicy:
    """A new policy by the name it has in the options, where ``lru`` is vLLM's own queue.

    Args:
        blocks: of the block pool.
    """
    return Queue(next_use) if name == "queue" else Gdsf(max_keys=4 * blocks)
