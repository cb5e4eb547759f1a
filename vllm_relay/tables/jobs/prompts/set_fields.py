# SPDX-License-Identifier: Apache-2.0
"""Fields whose values are lists in any order."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from vllm_relay.tables.ordering.element_order import order_elements

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
