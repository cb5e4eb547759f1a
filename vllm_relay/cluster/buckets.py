# SPDX-License-Identifier: Apache-2.0
"""Prompts that stream in, given to replicas prefix by prefix, to each when it has room.

Dynamic prefix bucketing (Wang, 2025) sorts a buffer, cuts it where neighbours have too little in
common, and sends the largest bucket. Here the buffer is a tree of prefixes, so that buckets have no
least size and no threshold: a replica goes on in the smallest subtree that it works in, and when
that is empty in the next larger one, where it takes what saves most and nobody else works in or
holds. Where others work everywhere it joins them, if what is left is worth the prefix.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, TypeVar

from vllm_relay.cluster.replica_index import Block, ReplicaIndex
from vllm_relay.prefix_cache.chains import common_depth
from vllm_relay.ranked import Ranked

T = TypeVar("T")

_MAX_LOOKED_AT = 16


@dataclass(frozen=True)
class BucketPrompt(Generic[T]):
    """
    Attributes:
        item: that is given to a replica.
        chain: the full blocks of the prompt.
        num_tokens: of the prompt, and of its answer where that is known.
    """

    item: T
    chain: Sequence[Block]
    num_tokens: int


@dataclass(slots=True, eq=False)
class _Node(Generic[T]):
    """The blocks [parent.depth, depth) of the chains of all prompts in this subtree."""

    parent: _Node[T] | None
    depth: int
    chain: Sequence[Block]  # of any prompt of the subtree
    children: dict[Block, _Node[T]] = field(default_factory=dict)
    prompts: deque[BucketPrompt[T]] = field(default_factory=deque)
    """Whose chain ends here."""
    size: int = 0  # prompts of the subtree
    num_tokens: int = 0  # of these
    workers: int = 0  # a bit for each replica that works in the subtree
    queue: Ranked[_Node[T]] = field(default_factory=Ranked)
    """Children, the best for a replica that holds none of them first."""
    held_by: dict[int, dict[_Node[T], None]] = field(default_factory=dict)
    """Children by the replicas that hold their first block, as far as that was seen."""

    @property
    def first_block(self) -> Block:
        assert self.parent is not None
        return self.chain[self.parent.depth]


class PrefixBuckets(Generic[T]):
    """
    Caches may be told while prompts wait. Of the prefixes that begin at a node, a replica finds
    those that it was told to hold among the 16 that wait longest. Others look at the best, and pass
    over up to 16 that somebody was told to hold.

    Args:
        caches: of the replicas.
        block_size_tokens: of a KV block.
        answer_tokens: what prompts cost beside their own tokens, until `answered` says more.
    """

    def __init__(
        self, caches: ReplicaIndex, block_size_tokens: int, answer_tokens: float = 0.0
    ) -> None:
        self._caches = caches
        self._block_size_tokens = block_size_tokens
        self._answer_tokens = answer_tokens
        self._num_answers = 1
        """With the one that was assumed."""
        self._root: _Node[T] = _Node(None, 0, ())
        self._places = [self._root] * caches.held.num_replicas
        """Where each replica works."""

    def __len__(self) -> int:
        """Prompts that wait for a replica."""
        return self._root.size

    def add(self, prompt: BucketPrompt[T]) -> None:
        """A prompt waits; also one that a replica was given and did not answer."""
        node = self._node_of(prompt.chain)
        node.prompts.append(prompt)
        self._count(node, 1, prompt.num_tokens)

    def next(self, replica: int) -> BucketPrompt[T] | None:
        """The next prompt of a replica; None if there is none that is better asked there than where
        others of its prefix are asked."""
        node = self._places[replica]
        while not node.size and node.parent is not None:
            node = node.parent
        found = self._lowest(node, replica)
        while found is None:
            if node.parent is None:
                return None
            node = node.parent
            found = self._lowest(node, replica)
        self._work_in(found, replica)
        prompt = found.prompts.popleft()
        self._count(found, -1, -prompt.num_tokens)
        self._caches.sent(replica, prompt.chain)
        return prompt

    def answered(self, num_tokens: int) -> None:
        """An answer has come: prompts cost the mean of those so far, from the next choice on where
        a replica may join others. Which of these it would join is ranked by what was known when a
        prompt or a replica last came or left there; the first in rank is ranked again."""
        self._num_answers += 1
        self._answer_tokens += (num_tokens - self._answer_tokens) / self._num_answers

    def lose(self, replica: int) -> None:
        """A replica is gone, or its cache is empty."""
        self._work_in(self._root, replica)
        self._caches.clear(replica)

    def _lowest(self, node: _Node[T], replica: int) -> _Node[T] | None:
        """A node of a subtree with prompts of its own, the best for a replica."""
        while node.size and not node.prompts:
            child = self._best_child(node, replica)
            if child is None:
                return None
            node = child
        return node if node.size else None

    def _best_child(self, node: _Node[T], replica: int) -> _Node[T] | None:
        held = node.held_by.get(replica, {})
        holds, is_other = self._caches.held.holds, ~(1 << replica)
        for child in list(islice(held, _MAX_LOOKED_AT)):
            is_there = node.children.get(child.first_block) is child
            if not is_there or not holds(replica, child.first_block):
                del held[child]
            elif not child.workers & is_other:
                return child
        # what was told since a child was made, of those that wait longest
        for block, child in islice(node.children.items(), _MAX_LOOKED_AT):
            if holds(replica, block) and not child.workers & is_other:
                return child
        best = self._first(node)
        others = best.workers & is_other
        if not others:
            return best
        # everybody's children have workers: join where most is left for each
        size = self._block_size_tokens
        edge_tokens = (best.depth - node.depth) * size
        own_tokens = self._cost(best) - best.size * best.depth * size
        return best if own_tokens / others.bit_count() > edge_tokens else None

    def _first(self, node: _Node[T]) -> _Node[T]:
        """The best child for a replica that holds none of them, by what is so now."""
        for _ in range(_MAX_LOOKED_AT):
            best = node.queue.first()
            assert best is not None
            self._queue(best)
            if node.queue.first() is best:
                break
        best = node.queue.first()
        assert best is not None
        return best

    def _work_in(self, node: _Node[T], replica: int) -> None:
        """A replica works here from now on, and no longer where it did."""
        before, bit = self._places[replica], 1 << replica
        if before is node:
            return
        entered = set(_path(node))
        for each in _path(before):
            if each in entered:
                break
            each.workers &= ~bit
            self._queue(each)
        for each in entered:
            if each.parent is not None and not each.workers & bit:
                each.workers |= bit
                each.parent.held_by.setdefault(replica, {})[each] = None
                self._queue(each)
        self._places[replica] = node

    def _count(self, node: _Node[T], size: int, num_tokens: int) -> None:
        for each in _path(node):
            each.size += size
            each.num_tokens += num_tokens
            if each.parent is None:
                return
            if each.size:
                self._queue(each)
            else:
                each.parent.queue.discard(each)
                del each.parent.children[each.first_block]

    def _queue(self, node: _Node[T]) -> None:
        """Give a node the place among its siblings that it has earned by now."""
        parent = node.parent
        if parent is None or parent.children.get(node.first_block) is not node:
            return
        num_workers = node.workers.bit_count()
        if num_workers:
            rank = True, False, -self._cost(node) // (num_workers + 1)
        else:
            saving = (node.depth - parent.depth) * (node.size - 1)
            rank = False, self._caches.held.is_held(node.first_block), -saving
        parent.queue.add(node, rank)

    def _cost(self, node: _Node[T]) -> float:
        """Of the prompts of a subtree and their answers, in tokens."""
        return node.num_tokens + node.size * self._answer_tokens

    def _node_of(self, chain: Sequence[Block]) -> _Node[T]:
        """The node at the end of a chain, made where there is none."""
        node = self._root
        while node.depth < len(chain):
            child = node.children.get(chain[node.depth])
            if child is None:
                child = _Node(node, len(chain), chain)
                node.children[child.first_block] = child
                for replica in self._caches.held.holders(child.first_block):
                    node.held_by.setdefault(replica, {})[child] = None
            else:
                depth = common_depth(chain, child.chain, child.depth, node.depth + 1)
                if depth < child.depth:
                    child = self._split(child, depth)
            node = child
        return node

    def _split(self, lower: _Node[T], depth: int) -> _Node[T]:
        """Cut the edge to `lower` at a depth; returns the new node there."""
        parent = lower.parent
        assert parent is not None
        upper: _Node[T] = _Node(parent, depth, lower.chain)
        upper.size, upper.num_tokens, upper.workers = lower.size, lower.num_tokens, lower.workers
        parent.children[upper.first_block] = upper
        parent.queue.discard(lower)
        for held in parent.held_by.values():
            if lower in held:
                del held[lower]
                held[upper] = None
        lower.parent = upper
        upper.children[lower.first_block] = lower
        for replica in self._caches.held.holders(lower.first_block):
            upper.held_by.setdefault(replica, {})[lower] = None
        self._queue(lower)
        self._queue(upper)
        return upper


def _path(node: _Node[T]) -> Iterator[_Node[T]]:
    """From a node up to the root."""
    above: _Node[T] | None = node
    while above is not None:
        yield above
        above = above.parent
