# SPDX-License-Identifier: Apache-2.0
"""A text with parts of it replaced, nested ones too."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

Render = Callable[["Splice"], str]


@dataclass(order=True)
class Splice:
    """
    Attributes:
        begin: of what is replaced, in the text.
        negative_end: its end, negative, so that outer ones come first.
        rank: among those of the same place, outer ones first.
    """

    begin: int
    negative_end: int
    rank: int
    render: Render = field(compare=False)

    @property
    def end(self) -> int:
        return -self.negative_end


class Splices:
    """
    Args:
        text: as it was given.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._splices: list[Splice] = []

    def add(self, begin: int, end: int, rank: int, render: Render) -> Splice:
        splice = Splice(begin, -end, rank, render)
        insort(self._splices, splice)
        return splice

    def remove(self, splice: Splice) -> None:
        self._splices = [other for other in self._splices if other is not splice]

    def render(self, begin: int, end: int, inside: Splice | None = None) -> str:
        """A part of the text.

        Args:
            inside: the splice of which it is a part; only those further inside are applied.
        """
        parts: list[str] = []
        at = begin
        for splice in self._splices:
            if inside is not None and splice <= inside:
                continue
            if splice.begin < at or splice.end > end:
                continue
            if inside is not None and splice.begin == end and splice.rank < inside.rank:
                continue  # what follows the part
            parts += [self.text[at : splice.begin], splice.render(splice)]
            at = splice.end
        parts.append(self.text[at:end])
        return "".join(parts)
