# SPDX-License-Identifier: Apache-2.0
"""The order in which waiting requests run: prefix by prefix, at every depth of the prefix tree.

Requests are kept in a compressed trie over the chained names of their blocks.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from vllm_relay.prefix_cache.chains import BlockName, common_depth
from vllm_relay.ranked import first, push

R = TypeVar("R", bound=Hashable)

Position = tuple[float, int]
"""A place in the order of arrival: the time of arrival in seconds where that counts, else zero; and
how many came before."""

_Key = tuple[bool, Position]  # what is smaller comes first
_Entry = tuple[_Key, int, "_Node[Any]"]  # of a heap of children: key, serial number, node


class _Node(Generic[R]):
    """The blocks [parent.depth, depth) of the chains of all requests in this subtree."""

    __slots__ = (
        "arrivals",
        "chain",
        "children",
        "depth",
        "parent",
        "queue",
        "queued",
        "queued_key",
        "requests",
        "resident",
        "size",
        "turn",
    )

    def __init__(self, parent: _Node[R] | None, depth: int, chain: Sequence[BlockName]) -> None:
        self.parent = parent
        self.depth = depth
        self.chain = chain  # of any request of the subtree
        self.children: dict[BlockName, _Node[R]] = {}
        self.requests: list[tuple[Position, R]] = []  # whose chain ends here, by position
        self.size = 0  # requests of the subtree
        self.arrivals: list[tuple[Position, int, R]] = []  # heap of the subtree, and some that left
        self.resident = False  # whether the first of these blocks was in the cache when last seen
        self.queue: list[_Entry] = []  # heap of the children
        self.queued_key: _Key | None = None  # of the valid entry in parent.queue
        self.queued = 0  # its serial number; 0: none
        self.turn = 0  # how many more may run before another prefix has its turn

    @property
    def first_block(self) -> BlockName:
        assert self.parent is not None
        return self.chain[self.parent.depth]

    @property
    def last_block(self) -> BlockName:
        return self.chain[self.depth - 1]


@dataclass(slots=True)
class _Place(Generic[R]):
    node: _Node[R]
    position: Position
    serial: int  # of this stay


@dataclass
class PrefixOrder(Generic[R]):
    """Waiting requests, of which `first` is the one to run next.

    Once a prefix has been begun, its requests run, at every depth. Then come prefixes that are in
    the cache, then that of the oldest request. Which of the others comes next changes no hits, as
    each is used up, but with another one than the oldest's rare prefixes would wait longest.

    While the oldest request is late, a prefix that was begun runs no more requests than waited when
    it began; after that the prefix of the oldest is next. So a prefix is left only when it has been
    used up, however late everybody is, and none is visited twice before all that are older have
    been.

    Args:
        is_resident: whether a block is in the cache now.
    """

    is_resident: Callable[[BlockName], bool]
    _root: _Node[R] = field(default_factory=lambda: _Node(None, 0, ()), init=False)
    _places: dict[R, _Place[R]] = field(default_factory=dict, init=False)
    _current: _Node[R] = field(init=False)
    """Of the prefix that ran last, as deep as requests wait."""
    _chosen: tuple[R | None, int] = field(default=(None, 0), init=False)
    """The request that was first, and the depth of the node that it was looked for in."""
    _serial: Iterator[int] = field(default_factory=lambda: itertools.count(1), init=False)

    def __post_init__(self) -> None:
        self._current = self._root

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, request: R) -> bool:
        return request in self._places

    def __iter__(self) -> Iterator[R]:
        """In order of position."""
        return iter(sorted(self._places, key=lambda request: self._places[request].position))

    def chain(self, request: R) -> Sequence[BlockName]:
        """The names of the blocks of a request that waits.

        Raises:
            KeyError: it does not wait.
        """
        node = self._places[request].node
        return node.chain if len(node.chain) == node.depth else node.chain[: node.depth]

    def add(self, request: R, chain: Sequence[BlockName], position: Position) -> None:
        """Let a request wait.

        Args:
            chain: the names of its blocks; must not change.
            position: its place in the order of arrival.
        """
        node = self._node_of(chain)
        bisect.insort(node.requests, (position, request))
        serial = next(self._serial)
        self._places[request] = _Place(node, position, serial)
        while True:
            if not node.size:
                node.resident = node.parent is not None and self.is_resident(node.first_block)
            node.size += 1
            arrival = position, serial, request
            push(node.arrivals, arrival, self._is_waiting, node.size)
            if node.parent is None:
                return
            self._queue_again(node)
            node = node.parent

    def look_again(self, request: R) -> None:
        """Blocks of a waiting request have come to be in the cache.

        Raises:
            KeyError: it does not wait.
        """
        for node in _path(self._places[request].node):
            if node.parent is not None and not node.resident and self.is_resident(node.first_block):
                node.resident = True
                self._queue_again(node)

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
            if not above.size:
                above.queued_key, above.queued = None, 0
            elif above.parent is not None:
                self._queue_again(above)
            above = above.parent
        self._prune(node)

    def _prune(self, node: _Node[R]) -> None:
        """Take nodes out, from this one up, that do not lead to a request."""
        while node.parent is not None and not node.size:
            del node.parent.children[node.first_block]
            if self._current is node:
                self._current = node.parent
            node = node.parent

    def take(self, request: R) -> None:
        """Take a request out that runs now: the order goes on from its prefix."""
        path = list(_path(self._places[request].node))
        chosen, depth = self._chosen
        if chosen != request:
            depth = common_depth(path[0].chain, self._current.chain, self._current.depth)
        for node in path:
            if node.depth > depth:
                node.turn = node.size  # its turn begins
            node.turn -= 1
            node.resident = node.parent is not None
        self._current = path[0]
        self.remove(request)

    def first(
        self,
        is_held: Callable[[Sequence[BlockName], int], bool] = lambda chain, depth: False,
        is_late: Callable[[R], bool] = lambda request: False,
    ) -> R | None:
        """The request to run next; None if none waits or all are held.

        Args:
            is_held: whether all requests must wait whose chains begin as the first blocks of this
                one, as many as the second argument says.
            is_late: whether a request is.
        """
        if not self._places:
            return None
        path = list(_path(self._current))
        begun = 0  # of the path, from here on up nothing is held
        for index, node in enumerate(path[:-1]):
            if is_held(node.chain, node.depth):
                begun = index + 1
        for node in path[begun:]:
            is_turn_over = node.turn <= 0 and node is not self._root
            if not node.size or (is_turn_over and is_late(self._oldest(self._root))):
                continue
            found = self._first_below(node, is_held, is_late)
            if found is not None:
                self._chosen = found, node.depth
                return found
        return None

    def num_held(
        self,
        chains: Iterable[Sequence[BlockName]],
        is_held: Callable[[Sequence[BlockName], int], bool],
    ) -> int:
        """How many requests are held.

        Args:
            chains: of those that others are held for.
            is_held: see `first`.
        """
        held: set[_Node[R]] = set()
        for chain in chains:
            node = self._root
            while node.depth < len(chain):
                child = node.children.get(chain[node.depth])
                if child is None:
                    break
                if is_held(child.chain, child.depth):
                    held.add(child)
                    break
                if (
                    child.depth > len(chain)
                    or child.chain[child.depth - 1] != chain[child.depth - 1]
                ):
                    break
                node = child
        return sum(node.size for node in held)

    def _first_below(
        self,
        top: _Node[R],
        is_held: Callable[[Sequence[BlockName], int], bool],
        is_late: Callable[[R], bool],
    ) -> R | None:
        """The first request of a subtree whose root is not held."""
        entered = [_Visit(top)]
        found = None
        while entered:
            visit = entered[-1]
            node = visit.node
            if node.requests:
                found = node.requests[0][1]
                break
            child = None
            if visit.is_new:
                visit.is_new = False
                oldest = self._oldest(node)
                if is_late(oldest):
                    child = node.children[self._places[oldest].node.chain[node.depth]]
            if child is None:
                child = self._next_child(visit)
            if child is None:
                entered.pop().put_back()
            elif not is_held(child.chain, child.depth):
                entered.append(_Visit(child))
        for visit in entered:
            visit.put_back()
        return found

    def _oldest(self, node: _Node[R]) -> R:
        """The oldest request of a subtree that has one."""
        arrival = first(node.arrivals, self._is_waiting)
        assert arrival is not None
        return arrival[2]

    def _is_waiting(self, arrival: tuple[Position, int, R]) -> bool:
        place = self._places.get(arrival[2])
        return place is not None and place.serial == arrival[1]

    def _next_child(self, visit: _Visit) -> _Node[R] | None:
        """The best child of a node that was not looked at yet."""
        queue = visit.node.queue
        if visit.looks_at_first:
            visit.passed_over.append(heapq.heappop(queue))
            visit.looks_at_first = False
        while (entry := first(queue, _is_queued)) is not None:
            child: _Node[R] = entry[2]
            if not child.resident or self.is_resident(child.first_block):
                visit.looks_at_first = True
                return child
            child.resident = False
            self._queue_again(child)
        return None

    def _queue_again(self, child: _Node[R]) -> None:
        """Give a child the place among its siblings that it has earned by now."""
        assert child.parent is not None
        key = (not child.resident, self._places[self._oldest(child)].position)
        if key != child.queued_key:
            child.queued_key, child.queued = key, next(self._serial)
            parent = child.parent
            push(parent.queue, (key, child.queued, child), _is_queued, len(parent.children))

    def _node_of(self, chain: Sequence[BlockName]) -> _Node[R]:
        """The node at the end of a chain, made where there is none."""
        node = self._root
        while node.depth < len(chain):
            child = node.children.get(chain[node.depth])
            if child is None:
                return self._attach(_Node(node, len(chain), chain))
            if len(chain) < child.depth or chain[child.depth - 1] != child.last_block:
                child = self._split(
                    child, common_depth(chain, child.chain, child.depth, node.depth + 1)
                )
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
        upper.size, upper.resident, upper.turn = lower.size, lower.resident, lower.turn
        upper.arrivals = lower.arrivals.copy()
        parent.children[upper.first_block] = upper
        lower.parent, lower.queued_key, lower.queued = upper, None, 0
        lower.resident = self.is_resident(lower.first_block)
        upper.children[lower.first_block] = lower
        if lower.size:
            self._queue_again(lower)
        return upper


@dataclass(slots=True)
class _Visit:
    """A node in which a request is looked for.

    Attributes:
        passed_over: the entries of its heap that were looked at in vain.
        looks_at_first: whether the first of its heap is looked at.
    """

    node: _Node[Any]
    passed_over: list[_Entry] = field(default_factory=list)
    looks_at_first: bool = False
    is_new: bool = True

    def put_back(self) -> None:
        for entry in self.passed_over:
            heapq.heappush(self.node.queue, entry)


def _is_queued(entry: _Entry) -> bool:
    """Whether the node has not left, and has no newer entry."""
    return entry[2].queued == entry[1]


def _path(node: _Node[R]) -> Iterator[_Node[R]]:
    """From a node up to the root."""
    above: _Node[R] | None = node
    while above is not None:
        yield above
        above = above.parent
