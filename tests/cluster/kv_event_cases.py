# SPDX-License-Identifier: Apache-2.0
"""An engine's cache as its KV events tell of it, in plain Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Event = tuple[Any, ...]
"""("stored", names, after, token ids), ("removed", names) or ("cleared",)."""


@dataclass
class NaiveEngine:
    """Blocks by their whole prefixes; the same prefix may be there several times.

    Attributes:
        seed: of its names, which no other engine has.
        events: that it published.
    """

    seed: int
    size: int
    blocks: Counter[tuple[int, ...]] = field(default_factory=Counter)
    events: list[Event] = field(default_factory=list)

    def name(self, prefix: Sequence[int]) -> int:
        return hash((self.seed, *prefix)) & (1 << 64) - 1

    def store(self, tokens: Sequence[int], num_known: int) -> None:
        """Compute the full blocks of a prompt but for the first."""
        size = self.size
        ends = range((num_known + 1) * size, len(tokens) + 1, size)
        if not ends:
            return
        prefixes = [tuple(tokens[:end]) for end in ends]
        after = self.name(tokens[: num_known * size]) if num_known else None
        own = list(tokens[num_known * size : ends[-1]])
        self.events.append(("stored", [self.name(each) for each in prefixes], after, own))
        self.blocks.update(prefixes)

    def evict(self, number: int) -> None:
        """One copy of a block."""
        held = sorted(+self.blocks)
        if held:
            prefix = held[number % len(held)]
            self.blocks[prefix] -= 1
            self.events.append(("removed", [self.name(prefix)]))

    def clear(self) -> None:
        self.blocks.clear()
        self.events.append(("cleared",))

    def num_held(self, tokens: Sequence[int]) -> int:
        """Full blocks of a prompt, without a gap."""
        count, size = 0, self.size
        while (count + 1) * size <= len(tokens) and self.blocks[
            tuple(tokens[: (count + 1) * size])
        ]:
            count += 1
        return count
