# SPDX-License-Identifier: Apache-2.0
"""The order of elements of lists whose order does not matter, for long common beginnings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from heapq import heapify, heappop, heappush


def order_elements(lists: Sequence[Sequence[str]]) -> list[list[str]]:
    """Each list with its elements in an order of their own.

    The element that most lists have comes first in these, and is followed in the same way by what
    is left of them; the other lists go on by themselves. Elements that nobody shares stay as they
    are, at the end.

    Args:
        lists: an element may be in one several times.
    """
    ordered: list[list[str]] = [[] for _ in lists]
    left = [list(each) for each in lists]
    groups = [list(range(len(lists)))]
    while groups:
        groups += _split(groups.pop(), left, ordered)
    return ordered


def _split(group: list[int], left: list[list[str]], ordered: list[list[str]]) -> list[list[int]]:
    """Groups of lists that go on with the same element, which moves from `left` to `ordered`."""
    having: dict[str, set[int]] = defaultdict(set)
    for index in group:
        for element in left[index]:
            having[element].add(index)
    heap = [(-len(indices), element) for element, indices in having.items()]
    heapify(heap)
    split = []
    undecided = set(group)
    while heap:
        count, element = heappop(heap)
        members = having[element] & undecided
        if len(members) < -count:
            if members:
                heappush(heap, (-len(members), element))
            continue
        if len(members) == 1:
            break
        for index in members:
            left[index].remove(element)
            ordered[index].append(element)
        undecided -= members
        split.append(sorted(members))
    for index in undecided:
        ordered[index] += left[index]
    return split
