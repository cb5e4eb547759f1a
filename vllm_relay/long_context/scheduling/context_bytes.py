# SPDX-License-Identifier: Apache-2.0
"""What contexts take that share what they continue."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(eq=False)
class ContextBytes:
    """What there is of a context. Later there may be something else of the same id.

    Attributes:
        num_bytes: that it takes besides its parent.
        parent: what it continues, and keeps as long as it is there.
    """

    num_bytes: int
    parent: ContextBytes | None = None


def with_parents(contexts: Iterable[ContextBytes]) -> set[ContextBytes]:
    """And all that they continue, each once."""
    found: set[ContextBytes] = set()
    for each in contexts:
        context: ContextBytes | None = each
        while context is not None and context not in found:
            found.add(context)
            context = context.parent
    return found


def bytes_with_parents(contexts: Iterable[ContextBytes]) -> int:
    """Of all of them, and of what they continue."""
    return sum(each.num_bytes for each in with_parents(contexts))
