# SPDX-License-Identifier: Apache-2.0
"""Which free block of the prefix cache leaves first.

A policy ranks the free blocks that nothing free depends on: those whose children in the prefix tree
are in use or gone. Therefore no block ever outlives its parent, whatever the policy says, and a
parent counts as much as the most valuable of its free descendants.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from vllm_relay.prefix_cache.next_use import NextUse

Rank = tuple[Any, ...]


@dataclass(slots=True, eq=False)
class PrefixNode:
    """A prefix of whole blocks, known by the key of its last block."""

    key: bytes
    parent: bytes | None
    index: int
    """Blocks before this one in its chain, or -1 while no chain with it is known."""
    depth_tokens: int = 0
    """Tokens up to the end of the block, known once the block was free."""
    copies: list[Any] = field(default_factory=list)
    """The free blocks with this key; whose they are only the queue knows."""
    children: int = 0
    """Known nodes with this one as their parent."""
    free_children: int = 0
    """Those among them that have free blocks."""
    uses: int = 0
    """Requests that were admitted with this prefix since it became known."""
    value: Any = None
    """What the policy wants to remember."""


class EvictionPolicy(ABC):
    """Ranks free blocks: of those without free children, the smallest rank leaves first."""

    looks_ahead = False
    """Whether the rank of a block changes when `NextUse` does."""

    @abstractmethod
    def rank(self, node: PrefixNode, freed_at: int) -> Rank:
        """The rank of a free block, different for all free blocks.

        Args:
            node: the block's prefix.
            freed_at: how many cached blocks were freed before this one.
        """

    def on_known(self, node: PrefixNode, parent: PrefixNode | None) -> None:  # noqa: B027
        """A prefix is about to be cached for the first time, or again since it was evicted."""

    def on_use(self, node: PrefixNode) -> None:  # noqa: B027
        """A request with this prefix is admitted; `node.uses` counts it already."""

    def on_evict(self, node: PrefixNode) -> None:  # noqa: B027
        """The last free block with this prefix is given to a request."""


class Fifo(EvictionPolicy):
    """The prefix that was cached first, whenever it was used; all that continues it leaves before
    it, again in the order in which it was first cached.

    This is the post-order of the prefix tree. The first child of a block has the same rank as its
    parent, so that ranks grow with the branchings of a chain and not with its length.
    """

    def __init__(self) -> None:
        self._num_known = 0

    def on_known(self, node: PrefixNode, parent: PrefixNode | None) -> None:
        self._num_known += 1
        if parent is None:
            node.value = (self._num_known,)
        elif parent.children == 0:
            node.value = parent.value
        else:
            node.value = (*parent.value, -node.index, self._num_known)

    def rank(self, node: PrefixNode, freed_at: int) -> Rank:
        return (node.value, -node.depth_tokens, freed_at)


class Gdsf(EvictionPolicy):
    """GreedyDual-Size-Frequency: the smallest age + uses at the time of its last use, as all blocks
    have the same size and the same cost.

    The age is the value of the last evicted block, so that what was popular long ago leaves too.
    """

    def __init__(self) -> None:
        self._age = 0

    def on_use(self, node: PrefixNode) -> None:
        node.value = self._age + node.uses

    def on_evict(self, node: PrefixNode) -> None:
        self._age = max(self._age, node.value)

    def rank(self, node: PrefixNode, freed_at: int) -> Rank:
        return (node.value, -node.depth_tokens, freed_at)


class Queue(EvictionPolicy):
    """Blocks that no waiting request needs, by LRU; then the block that is needed last, and of
    blocks needed by the same request, the deepest."""

    looks_ahead = True

    def __init__(self, next_use: NextUse) -> None:
        self._next_use = next_use.next_use

    def rank(self, node: PrefixNode, freed_at: int) -> Rank:
        position = self._next_use(node.key)
        if position is None:
            return (0, freed_at)
        return (1, -position, -node.depth_tokens, freed_at)


def make_policy(name: Literal["queue", "fifo", "gdsf"], next_use: NextUse) -> EvictionPolicy:
    """A new policy by the name it has in the options, where ``lru`` is vLLM's own queue."""
    if name == "queue":
        return Queue(next_use)
    return {"fifo": Fifo, "gdsf": Gdsf}[name]()


class PrefixTree:
    """What is known of the prefixes that have blocks: their parents, and which have free children.

    Nodes with free blocks are kept, and their ancestors. Of the others, which are in use, about to
    be cached, or were never cached, those whose chains were noted last.

    Args:
        max_nodes_in_use: how many nodes without free blocks are kept, if they have no descendants
            with free ones.
    """

    def __init__(self, policy: EvictionPolicy, max_nodes_in_use: int) -> None:
        self.nodes: dict[bytes, PrefixNode] = {}
        self._policy = policy
        self._max_nodes_in_use = max_nodes_in_use
        self._num_free = 0  # nodes with free blocks
        self._idle: OrderedDict[bytes, None] = OrderedDict()  # neither free blocks nor children

    def note_chain(self, keys: Sequence[bytes], *, is_use: bool = True) -> None:
        """A request with this chain of keys is admitted, or was and is not counted again."""
        nodes, on_use = self.nodes, self._policy.on_use
        parent: PrefixNode | None = None
        for index, key in enumerate(keys):
            node = nodes.get(key)
            if node is None:
                node = self._add(key, parent, index)
            elif node.index < 0:
                self._place(node, parent, index)
            if is_use or not node.uses:
                node.uses += 1
                on_use(node)
            parent = node
        if parent is not None and parent.key in self._idle:
            self._idle.move_to_end(parent.key)
        self._forget()

    def free(self, key: bytes, depth_tokens: int, copy: Any) -> PrefixNode:
        """A block with this key becomes free."""
        node = self.nodes.get(key)
        if node is None:
            node = self._add(key, None, -1)
            node.uses = 1
            self._policy.on_use(node)
        node.depth_tokens = depth_tokens
        if not node.copies:
            self._num_free += 1
            self._idle.pop(key, None)
            if node.parent is not None:
                self.nodes[node.parent].free_children += 1
        node.copies.append(copy)
        return node

    def use(self, node: PrefixNode, copy: Any) -> PrefixNode | None:
        """A free block is in use again.

        Returns:
            The parent, if this was its last free child.
        """
        node.copies.remove(copy)
        if node.copies:
            return None
        parent = self._no_longer_free(node)
        self._forget()
        return parent

    def evict(self, node: PrefixNode, copy: Any) -> PrefixNode | None:
        """A free block is cached no longer.

        Returns:
            The parent, if this was its last free child.
        """
        node.copies.remove(copy)
        if node.copies:
            return None
        self._policy.on_evict(node)
        node.uses = 0
        parent = self._no_longer_free(node)
        if not node.children:
            self._drop(node)
        return parent

    def _add(self, key: bytes, parent: PrefixNode | None, index: int) -> PrefixNode:
        node = self.nodes[key] = PrefixNode(key, None, index)
        self._idle[key] = None
        if parent is not None and not 0 <= parent.index < index:
            parent = None
        self._policy.on_known(node, parent)
        self._link(node, parent)
        return node

    def _place(self, node: PrefixNode, parent: PrefixNode | None, index: int) -> None:
        """A node that was freed before any chain with it was known gets its parent."""
        node.index = index
        if parent is not None and 0 <= parent.index < index:
            self._link(node, parent)

    def _link(self, node: PrefixNode, parent: PrefixNode | None) -> None:
        if parent is None:
            return
        node.parent = parent.key
        parent.children += 1
        parent.free_children += bool(node.copies)
        self._idle.pop(parent.key, None)

    def _no_longer_free(self, node: PrefixNode) -> PrefixNode | None:
        self._num_free -= 1
        if not node.children:
            self._idle[node.key] = None
        if node.parent is None:
            return None
        parent = self.nodes[node.parent]
        parent.free_children -= 1
        return None if parent.free_children else parent

    def _forget(self) -> None:
        while self._idle and len(self.nodes) - self._num_free > self._max_nodes_in_use:
            self._drop(self.nodes[next(iter(self._idle))])

    def _drop(self, node: PrefixNode) -> None:
        """Forgets an idle node."""
        del self.nodes[node.key], self._idle[node.key]
        if node.parent is None:
            return
        parent = self.nodes[node.parent]
        parent.children -= 1
        if not parent.children and not parent.copies:
            self._idle[parent.key] = None
            self._idle.move_to_end(parent.key, last=False)
