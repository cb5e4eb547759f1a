# SPDX-License-Identifier: Apache-2.0
"""Fields whose values are lists in any order, and the order with long common beginnings."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

_decoder = json.JSONDecoder()
_SPACES = re.compile(r"\s*")


def list_elements(value: str) -> list[str] | None:
    """The elements of a JSON list, each as it is written there; None if it is no list."""
    if not value.startswith("["):
        return None
    elements: list[str] = []
    begin = _after_spaces(value, 1)
    while value[begin] != "]":
        _, end = _decoder.raw_decode(value, begin)
        elements.append(value[begin:end])
        end = _after_spaces(value, end)
        begin = _after_spaces(value, end + 1) if value[end] == "," else end
    return elements


def sorted_list(value: str) -> str:
    """A JSON list with its elements in one order for all lists of these elements; other JSON as it
    is."""
    elements = list_elements(value)
    return value if elements is None else _list_of(sorted(elements))


def reordered_lists(values: Sequence[str]) -> list[str]:
    """JSON lists, each with its elements in the order that is best for all."""
    distinct = list(dict.fromkeys(values))
    elements = [list_elements(value) for value in distinct]
    ordered = order_elements([each or [] for each in elements])
    reordered = {
        value: value if each is None else _list_of(texts)
        for value, each, texts in zip(distinct, elements, ordered, strict=True)
    }
    return [reordered[value] for value in values]


def _list_of(elements: Sequence[str]) -> str:
    return f"[{', '.join(elements)}]"


def _after_spaces(text: str, begin: int) -> int:
    found = _SPACES.match(text, begin)
    assert found is not None
    return found.end()


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
