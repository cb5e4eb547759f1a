# SPDX-License-Identifier: Apache-2.0
"""The order in which waiting requests run: prefix by prefix, at every depth of the prefix tree.

Requests are kept in a compressed trie over the chained names of their blocks. Such a name tells the
whole prefix up to its block, so two chains that agree at one depth agree at all smaller ones: one
comparison tells whether a request runs along an edge to its end.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

R = TypeVar("R", bound=Hashable)


BlockName = bytes | tuple[bytes, bytes]
"""A chained block hash; or a hash that is not chained, and a digest of all up to it."""

Position = tuple[float, int]
"""A place in the order of arrival: the time of arrival in seconds where that counts, else zero; and
how many came before."""

_Key = tuple[bool, int, Position]  # what is smaller comes first
_Entry = tuple[_Key, int, Any]  # of a heap of children: key, serial number, node


class _Node(Generic[R]):
    """The blocks [parent.depth, depth) of the chains of all requests in this subtree."""

    __slots__ = (
        "chain",
        "children",
        "depth",
        "hold_until_s",
        "leader",
        "oldest",
        "parent",
        "queue",
        "queued",
        "queued_key",
        "requests",
        "resident",
        "size",
    )

    def __init__(self, parent: _Node[R] | None, depth: int, chain: Sequence[BlockName]) -> None:
        self.parent = parent
        self.depth = depth
        self.chain = chain  # of any request of the subtree
        self.children: dict[BlockName, _Node[R]] = {}
        self.requests: list[tuple[Position, R]] = []  # whose chain ends here, by position
        self.size = 0  # waiting requests of the subtree
        self.oldest: Position = (0.0, 0)  # the smallest position that came into the subtree
        self.resident = False  # whether the first of these blocks was in the cache when last seen
        self.queue: list[_Entry] = []  # heap of the children
        self.queued_key: _Key | None = None  # of the valid entry in parent.queue
        self.queued = 0  # its serial number; 0: none
        self.leader: R | None = None  # who computes these blocks now
        self.hold_until_s: float | None = None  # once for all who lead until the blocks are there

    @property
    def first_block(self) -> BlockName:
        assert self.parent is not None
        return self.chain[self.parent.depth]

    @property
    def last_block(self) -> BlockName:
        return self.chain[self.depth - 1]


@dataclass(frozen=True)
class _Place(Generic[R]):
    node: _Node[R]
    position: Position


@dataclass
class PrefixOrder(Generic[R]):
    """Waiting requests, of which `first` is the one to run next.

    Once a prefix has been begun, all of its requests run, at every depth. Then come prefixes that
    are in the cache, then those that most requests share (every block of a prefix of n requests
    saves n - 1 computations), then the oldest.

    Of requests that share blocks which are not in the cache one goes first, if `max_hold_s` is not
    zero: the others, also those that are added while it runs, are held until it has computed them,
    until `release` is called for it, or for `max_hold_s`.

    Args:
        is_resident: whether a block is in the cache now.
        max_hold_s: seconds.
    """

    is_resident: Callable[[BlockName], bool]
    max_hold_s: float = 0.0
    _root: _Node[R] = field(default_factory=lambda: _Node(None, 0, ()), init=False)
    _places: dict[R, _Place[R]] = field(default_factory=dict, init=False)
    _led: dict[R, list[_Node[R]]] = field(default_factory=dict, init=False)
    _current: _Node[R] | None = field(default=None, init=False)
    _serial: Iterator[int] = field(default_factory=lambda: itertools.count(1), init=False)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, request: R) -> bool:
        return request in self._places

    @property
    def is_led(self) -> bool:
        """Whether requests may be held for one that runs."""
        return bool(self._led)

    @property
    def held(self) -> int:
        """Requests that wait for another one to compute their prefix, as far as is known."""
        return sum(
            node.size
            for leader, nodes in self._led.items()
            for node in nodes
            if node.leader == leader and not self._has_led_ancestor(node)
        )

    @property
    def num_leaders(self) -> int:
        """Requests for which others are held, as far as is known."""
        return sum(
            any(node.leader == leader and node.size for node in nodes)
            for leader, nodes in self._led.items()
        )

    def __iter__(self) -> Iterator[R]:
        """In order of position."""
        return iter(sorted(self._places, key=lambda request: self._places[request].position))

    def add(self, request: R, chain: Sequence[BlockName], position: Position) -> None:
        """Let a request wait.

        Args:
            chain: the names of its blocks; must not change.
            position: its place in the order of arrival.
        """
        self.release(request)
        node = self._node_of(chain)
        bisect.insort(node.requests, (position, request))
        self._places[request] = _Place(node, position)
        while True:
            if not node.size:
                node.oldest = position
                node.resident = node.parent is not None and self.is_resident(node.first_block)
            node.oldest = min(node.oldest, position)
            node.size += 1
            if node.parent is None:
                return
            self._queue_again(node)
            node = node.parent

    def remove(self, request: R) -> None:
        """Take a request out, whoever's turn it is.

        Raises:
            KeyError: it does not wait.
        """
        place = self._places.pop(request)
        node = place.node
        del node.requests[bisect.bisect_left(node.requests, (place.position,))]
        above: _Node[R] | None = node
        while above is not None:
            above.size -= 1
            if above.size == 0:
                above.queued_key, above.queued = None, 0
            above = above.parent
        self._prune(node)

    def take(self, request: R, now_s: float) -> None:
        """Take a request out that runs now: the order goes on from its prefix."""
        node: _Node[R] | None = self._places[request].node
        path = []
        while node is not None and node.parent is not None:
            path.append(node)
            node = node.parent
        self._current = path[0] if path else None
        if self.max_hold_s > 0:
            self._lead(request, path, now_s)
        self.remove(request)
        for node in path:
            if node.size:
                node.resident = True
                self._queue_again(node)

    def _lead(self, request: R, path: list[_Node[R]], now_s: float) -> None:
        """Others are held for this request, which computes the blocks of these nodes."""
        led = []
        for node in path:
            if self.is_resident(node.last_block):
                node.hold_until_s = None
                continue
            if node.hold_until_s is None:
                node.hold_until_s = now_s + self.max_hold_s
            if now_s < node.hold_until_s:
                node.leader = request
                led.append(node)
        if led:
            self._led[request] = led

    def num_records(self) -> int:
        """How much is kept while no request waits: the nodes that are led, and their leaders."""
        return len(self._led) + len(self._root.children)

    def release(self, request: R) -> None:
        """No longer hold the requests that wait for the blocks this one was to compute."""
        for node in self._led.pop(request, ()):
            if node.leader == request:
                node.leader = node.hold_until_s = None
            self._prune(node)

    def _prune(self, node: _Node[R]) -> None:
        """Take nodes out, from this one up, that neither lead to a request nor are computed."""
        while node.parent is not None:
            if node.size or node.children or node.leader is not None:
                return
            if node.parent.children.get(node.first_block) is node:
                del node.parent.children[node.first_block]
            if self._current is node:
                self._current = node.parent
            node = node.parent

    def first(self, now_s: float) -> R | None:
        """The request to run next; None if none waits or all are held."""
        path = []
        node = self._current or self._root
        while node.parent is not None:
            path.append(node)
            node = node.parent
        begun = 0  # of the path, from here on up nothing is held
        for index, node in enumerate(path):
            if self._is_held(node, now_s):
                begun = index + 1
        for node in [*path[begun:], self._root]:
            if node.size:
                found = self._first_below(node, now_s)
                if found is not None:
                    return found
        return None

    def _first_below(self, top: _Node[R], now_s: float) -> R | None:
        """The first request of a subtree whose root is not held."""
        entered = [top]
        passed_over: list[list[_Entry]] = [[]]
        found = None
        while entered:
            node = entered[-1]
            if node.requests:
                found = node.requests[0][1]
                break
            child = self._next_child(node, passed_over[-1])
            if child is None:
                _put_back(entered.pop(), passed_over.pop())
            elif not self._is_held(child, now_s):
                entered.append(child)
                passed_over.append([])
        for node, entries in zip(entered, passed_over, strict=True):
            _put_back(node, entries)
        return found

    def _next_child(self, node: _Node[R], passed_over: list[_Entry]) -> _Node[R] | None:
        """The best child in the queue of `node`; its entry moves to `passed_over`."""
        while node.queue:
            entry = heapq.heappop(node.queue)
            child = entry[2]
            if child.queued != entry[1]:
                continue  # it has left, or has a newer entry
            if child.resident and not self.is_resident(child.first_block):
                child.resident = False
                self._queue_again(child)
                continue
            passed_over.append(entry)
            return child
        return None

    @staticmethod
    def _has_led_ancestor(node: _Node[R]) -> bool:
        above = node.parent
        while above is not None and above.leader is None:
            above = above.parent
        return above is not None

    def _is_held(self, node: _Node[R], now_s: float) -> bool:
        if node.leader is None or node.hold_until_s is None:
            return False
        if self.is_resident(node.last_block):
            node.leader = node.hold_until_s = None
        elif now_s >= node.hold_until_s:
            node.leader = None
        return node.leader is not None

    def _queue_again(self, child: _Node[R]) -> None:
        """Give a child the place among its siblings that it has earned by now."""
        assert child.parent is not None
        # a prefix gets a new place when its requests have doubled, not with every one
        key = (not child.resident, -child.size.bit_length(), child.oldest)
        if key != child.queued_key:
            child.queued_key, child.queued = key, next(self._serial)
            queue = child.parent.queue
            heapq.heappush(queue, (key, child.queued, child))
            if len(queue) > 64 + 2 * len(child.parent.children):
                queue[:] = [entry for entry in queue if entry[2].queued == entry[1]]
                heapq.heapify(queue)

    def _node_of(self, chain: Sequence[BlockName]) -> _Node[R]:
        """The node at the end of a chain, made where there is none."""
        node = self._root
        while node.depth < len(chain):
            child = node.children.get(chain[node.depth])
            if child is None:
                return self._attach(_Node(node, len(chain), chain))
            if len(chain) < child.depth or chain[child.depth - 1] != child.last_block:
                child = self._split(child, _common_depth(chain, child, node.depth + 1))
            node = child
        return node

    def _attach(self, node: _Node[R]) -> _Node[R]:
        assert node.parent is not None
        node.parent.children[node.first_block] = node
        return node

    def _split(self, lower: _Node[R], depth: int) -> _Node[R]:
        """Cut the edge to `lower` at a depth; returns the new node there."""
        parent = lower.parent
        assert parent is not None
        upper: _Node[R] = _Node(parent, depth, lower.chain)
        upper.size, upper.oldest, upper.resident = lower.size, lower.oldest, lower.resident
        upper.leader, upper.hold_until_s = lower.leader, lower.hold_until_s
        if upper.leader is not None:
            self._led.setdefault(upper.leader, []).append(upper)
        parent.children[upper.first_block] = upper
        lower.parent, lower.queued_key, lower.queued = upper, None, 0
        lower.resident = self.is_resident(lower.first_block)
        upper.children[lower.first_block] = lower
        if lower.size:
            self._queue_again(lower)
        return upper


def _put_back(node: _Node[R], entries: list[_Entry]) -> None:
    for entry in entries:
        heapq.heappush(node.queue, entry)


def _common_depth(chain: Sequence[BlockName], node: _Node[R], known: int) -> int:
    """How many leading blocks a chain has in common with the chains of `node`, at least `known`."""
    low, high = known, min(len(chain), node.depth)
    while low < high:
        middle = (low + high + 1) // 2
        if chain[middle - 1] == node.chain[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
