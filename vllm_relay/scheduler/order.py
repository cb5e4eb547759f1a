# SPDX-License-Identifier: Apache-2.0
"""The order in which waiting requests run: prefix by prefix, at every depth of the prefix tree.

Requests are kept in a compressed trie over the chained names of their blocks.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from vllm_relay.prefix_cache.chains import BlockName, common_depth
from vllm_relay.ranked import Ranked, first, push

R = TypeVar("R", bound=Hashable)

Position = tuple[float, int]
"""A place in the order of arrival: the time of arrival in seconds where that counts, else zero; and
how many came before."""


@dataclass(slots=True, eq=False)
class _Node(Generic[R]):
    """The blocks [parent.depth, depth) of the chains of all requests in this subtree."""

    parent: _Node[R] | None
    depth: int
    chain: Sequence[BlockName]  # of any request of the subtree
    children: dict[BlockName, _Node[R]] = field(default_factory=dict)
    requests: list[tuple[Position, R]] = field(default_factory=list)
    """Whose chain ends here, by position."""
    size: int = 0  # requests of the subtree
    arrivals: list[tuple[Position, int, R]] = field(default_factory=list)
    """Heap of the subtree, and some that left."""
    resident: bool = False  # whether the first of these blocks was in the cache when last seen
    queue: Ranked[_Node[R]] = field(default_factory=Ranked)
    """Children, the resident ones first and then the oldest."""
    turn: int = 0  # how many more may run before another prefix has its turn

    @property
    def first_block(self) -> BlockName:
        assert self.parent is not None
        return self.chain[self.parent.depth]


@dataclass(slots=True)
class _Place(Generic[R]):
    node: _Node[R]
    position: Position
    serial: int  # of this stay


@dataclass
class PrefixOrder(Generic[R]):
    """Waiting requests, of which `first` is the one to run next; docs/scheduler.md says which
    ("Order", and "Turns" where requests are late). `is_resident` tells what is in the cache now."""

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
        """The names of the blocks of a request that waits."""
        node = self._places[request].node
        return node.chain if len(node.chain) == node.depth else node.chain[: node.depth]

    def add(self, request: R, chain: Sequence[BlockName], position: Position) -> None:
        """Let a request wait. The names of its blocks must not change."""
        node = self._node_of(chain)
        bisect.insort(node.requests, (position, request))
        serial = next(self._serial)
        self._places[request] = _Place(node, position, serial)
        arrival = position, serial, request
        for each in _path(node):
            if not each.size:
                each.resident = each.parent is not None and self.is_resident(each.first_block)
            each.size += 1
            push(each.arrivals, arrival, self._is_waiting, each.size)
            self._queue(each)

    def look_again(self, request: R) -> None:
        """Blocks of a waiting request have come to be in the cache."""
        for node in _path(self._places[request].node):
            if node.parent is not None and not node.resident and self.is_resident(node.first_block):
                node.resident = True
                self._queue(node)

    def remove(self, request: R) -> None:
        """Take a request out, whoever's turn it is."""
        place = self._places.pop(request)
        node = place.node
        del node.requests[bisect.bisect_left(node.requests, (place.position,))]
        for each in _path(node):
            each.size -= 1
            if each.size:
                self._queue(each)
            elif each.parent is not None:
                each.parent.queue.discard(each)
                del each.parent.children[each.first_block]
                if self._current is each:
                    self._current = each.parent

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
            if is_turn_over and is_late(self._oldest(self._root)):
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
        """How many requests are held for those with these chains; `is_held` as in `first`."""
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
                node = child  # where its chain is another one, none of its children goes on
        return sum(node.size for node in held)

    def _first_below(
        self,
        top: _Node[R],
        is_held: Callable[[Sequence[BlockName], int], bool],
        is_late: Callable[[R], bool],
    ) -> R | None:
        """The first request of a subtree whose root is not held."""
        entered: list[tuple[_Node[R], list[_Node[R]]]] = [(top, [])]  # and the children looked at
        found = None
        while entered:
            node, seen = entered[-1]
            if node.requests:
                found = node.requests[0][1]
                break
            oldest = self._oldest(node)
            child: _Node[R] | None
            if not seen and is_late(oldest):
                child = node.children[self._places[oldest].node.chain[node.depth]]
            else:
                child = self._best_child(node)
            if child is None:
                self._put_back(entered.pop()[1])
                continue
            node.queue.discard(child)
            seen.append(child)
            if not is_held(child.chain, child.depth):
                entered.append((child, []))
        for _, seen in entered:
            self._put_back(seen)
        return found

    def _oldest(self, node: _Node[R]) -> R:
        """The oldest request of a subtree that has one."""
        arrival = first(node.arrivals, self._is_waiting)
        assert arrival is not None
        return arrival[2]

    def _is_waiting(self, arrival: tuple[Position, int, R]) -> bool:
        place = self._places.get(arrival[2])
        return place is not None and place.serial == arrival[1]

    def _best_child(self, node: _Node[R]) -> _Node[R] | None:
        """The first child in a node's queue, by what is in the cache now."""
        while (child := node.queue.first()) is not None:
            if not child.resident or self.is_resident(child.first_block):
                return child
            child.resident = False
            self._queue(child)
        return None

    def _put_back(self, children: Iterable[_Node[R]]) -> None:
        for child in children:
            self._queue(child)

    def _queue(self, node: _Node[R]) -> None:
        """Give a node the place among its siblings that it has earned by now."""
        if node.parent is not None:
            rank = (not node.resident, self._places[self._oldest(node)].position)
            node.parent.queue.add(node, rank)

    def _node_of(self, chain: Sequence[BlockName]) -> _Node[R]:
        """The node at the end of a chain, made where there is none."""
        node = self._root
        while node.depth < len(chain):
            child = node.children.get(chain[node.depth])
            if child is None:
                child = _Node(node, len(chain), chain)
                node.children[child.first_block] = child
            elif len(chain) < child.depth or chain[child.depth - 1] != child.chain[child.depth - 1]:
                common = common_depth(chain, child.chain, child.depth, node.depth + 1)
                child = self._split(child, common)
            node = child
        return node

    def _split(self, lower: _Node[R], depth: int) -> _Node[R]:
        """Cut the edge to `lower` at a depth; returns the new node there."""
        parent = lower.parent
        assert parent is not None
        upper: _Node[R] = _Node(parent, depth, lower.chain)
        upper.size, upper.resident, upper.turn = lower.size, lower.resident, lower.turn
        upper.arrivals = lower.arrivals.copy()
        parent.children[upper.first_block] = upper
        parent.queue.discard(lower)
        lower.parent = upper
        lower.resident = self.is_resident(lower.first_block)
        upper.children[lower.first_block] = lower
        self._queue(lower)
        return upper


def _path(node: _Node[R]) -> Iterator[_Node[R]]:
    """From a node up to the root."""
    above: _Node[R] | None = node
    while above is not None:
        yield above
        above = above.parent
