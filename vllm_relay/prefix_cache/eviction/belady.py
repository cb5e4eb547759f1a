# SPDX-License-Identifier: Apache-2.0
"""How many blocks the best possible eviction would find in the prefix cache."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

NEVER = 1 << 62


def belady_hits(chains: Sequence[Sequence[bytes]], capacity_blocks: int) -> int:
    """Hit blocks of requests that run one after the other with all of them known beforehand.

    A request keeps the blocks of its longest cached prefix, which are its hits, and caches all its
    others. For these, the block that is needed last leaves, and of equals the deepest in its chain.

    Args:
        chains: the block keys of each request in the order in which they run; a key stands for all
            blocks up to its own.
        capacity_blocks: blocks of the cache.

    Raises:
        ValueError: a request does not fit into the cache.
    """
    next_uses = _next_uses(chains)
    cached: dict[bytes, int] = {}  # key -> the next request that needs it
    heap: list[tuple[int, int, bytes]] = []
    hits = 0
    for chain, uses in zip(chains, next_uses, strict=True):
        if len(chain) > capacity_blocks:
            raise ValueError(
                f"a request of {len(chain)} blocks does not fit into {capacity_blocks} blocks"
            )
        hits += next((i for i, key in enumerate(chain) if key not in cached), len(chain))
        # in the heap only once it ran: what runs cannot leave
        cached.update(zip(chain, uses, strict=True))
        while len(cached) > capacity_blocks:
            negative_use, _, key = heappop(heap)
            if cached.get(key) == -negative_use:
                del cached[key]
        for index, (key, use) in enumerate(zip(chain, uses, strict=True)):
            heappush(heap, (-use, -index, key))
    return hits


def _next_uses(chains: Sequence[Sequence[bytes]]) -> list[list[int]]:
    """For each block of each request, the next request that needs it, or NEVER."""
    next_use: dict[bytes, int] = {}
    next_uses = []
    for position in range(len(chains) - 1, -1, -1):
        chain = chains[position]
        next_uses.append([next_use.get(key, NEVER) for key in chain])
        next_use.update(dict.fromkeys(chain, position))
    next_uses.reverse()
    return next_uses
