# SPDX-License-Identifier: Apache-2.0
"""In which order the nodes of a forest leave the KV cache, if nothing is used meanwhile."""

from __future__ import annotations

from heapq import heapify, heappop, heappush, nsmallest

from vllm_relay.page.forest import Forest, Node

MAX_PLACES = 256
"""How many of the first are numbered."""


def first_to_leave(forest: Forest) -> list[Node]:
    """The first nodes to leave, the very first one first: what nothing continues and nobody uses,
    by how it is kept and when it was last used; then what these continue."""
    leaves = [
        each for each in forest.nodes.values() if not each.children and _is_free(forest, each)
    ]
    heap = [(*_order(each), each.id) for each in nsmallest(MAX_PLACES, leaves, key=_order)]
    heapify(heap)
    left: list[Node] = []
    remaining: dict[int, int] = {}  # of nodes: how many that continue them are still there
    while heap and len(left) < MAX_PLACES:
        node = forest.nodes[heappop(heap)[-1]]
        left.append(node)
        parent = node.parent
        if parent is None:
            continue
        remaining[parent.id] = remaining.get(parent.id, len(parent.children)) - 1
        if not remaining[parent.id] and _is_free(forest, parent):
            heappush(heap, (*_order(parent), parent.id))
    return left


def number(forest: Forest) -> None:
    """Give the first nodes to leave their places, and all others none."""
    places = {node: place for place, node in enumerate(first_to_leave(forest))}
    for node in forest.nodes.values():
        forest.set_next_out(node, places.get(node))


def _is_free(forest: Forest, node: Node) -> bool:
    """Whether its last blocks may leave."""
    is_pinned = forest.is_pinned(node.blocks[-1])
    return not node.requests and node.kept is not None and not is_pinned


def _order(node: Node) -> tuple[int, float]:
    return node.kept or 0, node.used_s
