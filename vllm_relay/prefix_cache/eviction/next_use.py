# SPDX-License-Identifier: Apache-2.0
"""Which cached blocks the waiting requests will need, and how soon."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from heapq import heapify, heappop, heappush

from vllm_relay.prefix_cache.chains import common_depth

Rank = tuple[float, ...]
"""When a request runs: the smaller, the sooner. All ranks of one `NextUse` have the same length."""

Chains = Sequence[Sequence[bytes]]
"""Keys of the blocks that a request needs. In a chain, a key stands for all keys up to its own."""


class NextUse:
    """For each block key, the soonest of the waiting requests that need the block.

    Keys that the same requests wait for, one behind the other in a chain, are kept as one run: a
    request costs as much as its chain has branchings, and no more for every block than one entry of
    a dict.
    """

    def __init__(self) -> None:
        self._runs: dict[bytes, _Run] = {}  # every key of every run
        self._waiting: dict[Rank, Chains] = {}
        self._listeners: list[Callable[[Chains, bool], None]] = []

    def listen(self, on_remove: Callable[[Chains, bool], None]) -> None:
        """Calls `on_remove` after every `remove`, with the chains of the request and `runs`."""
        self._listeners.append(on_remove)

    def add(self, rank: Rank, chains: Chains) -> None:
        """A request waits.

        Args:
            rank: of this request alone, until it is removed.
            chains: must not change, and have no key in common.

        Raises:
            ValueError: a request of this rank waits already.
        """
        if rank in self._waiting:
            raise ValueError(f"a request of rank {rank} waits already: remove it first")
        self._waiting[rank] = chains
        for chain in chains:
            known = 0
            for run in self._runs_of(chain):
                run.add(rank)
                known = run.end
            if known < len(chain):
                new = _Run(chain, len(chain), [rank])
                self._runs.update(dict.fromkeys(chain[known:], new))

    def remove(self, rank: Rank, *, runs: bool) -> None:
        """The request that was added with this rank waits no longer; `runs` says that it runs."""
        chains = self._waiting.pop(rank)
        for chain in chains:
            begin = 0
            for run in self._runs_of(chain):
                run.remove(rank)
                if not run.ranks:
                    for key in chain[begin : run.end]:
                        del self._runs[key]
                begin = run.end
        for on_remove in self._listeners:
            on_remove(chains, runs)

    @property
    def needed(self) -> Set[bytes]:
        """The keys of all blocks that waiting requests need; changes with these."""
        return self._runs.keys()

    def next_use(self, key: bytes) -> Rank | None:
        """The rank of the first request that needs the block; None if nobody waits for it."""
        run = self._runs.get(key)
        return None if run is None else run.ranks[0]

    def _runs_of(self, chain: Sequence[bytes]) -> Iterator[_Run]:
        """The runs that the chain goes through from its beginning. One that it leaves halfway is
        cut there."""
        depth = 0
        while depth < len(chain):
            run = self._runs.get(chain[depth])
            if run is None:
                return
            if len(chain) < run.end or chain[run.end - 1] != run.chain[run.end - 1]:
                end = run.end
                run.end = common_depth(chain, run.chain, end, depth + 1)
                behind = _Run(run.chain, end, run.waiting_ranks())
                self._runs.update(dict.fromkeys(run.chain[run.end : end], behind))
            yield run
            depth = run.end


class _Run:
    """Successive keys of a chain: up to `end`, from where the run before ends."""

    __slots__ = ("_removed", "chain", "end", "ranks")

    def __init__(self, chain: Sequence[bytes], end: int, ranks: list[Rank]) -> None:
        self.chain = chain  # of any request that needs these blocks
        self.end = end
        self.ranks = ranks  # a heap, from which ranks are removed late
        self._removed: set[Rank] = set()  # still in the heap, but never at its top

    def waiting_ranks(self) -> list[Rank]:
        ranks = [rank for rank in self.ranks if rank not in self._removed]
        heapify(ranks)
        return ranks

    def add(self, rank: Rank) -> None:
        if rank in self._removed:
            self._removed.remove(rank)
        else:
            heappush(self.ranks, rank)

    def remove(self, rank: Rank) -> None:
        ranks, removed = self.ranks, self._removed
        if rank != ranks[0]:
            removed.add(rank)
            if 2 * len(removed) > len(ranks):
                self.ranks = self.waiting_ranks()
                removed.clear()
            return
        heappop(ranks)
        while ranks and ranks[0] in removed:
            removed.remove(heappop(ranks))
