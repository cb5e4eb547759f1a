# SPDX-License-Identifier: Apache-2.0
"""How many links the chain of a context may have: each is searched by itself in every step."""

from __future__ import annotations

from collections.abc import Sequence

MAX_LINKS = 32
MIN_LINK_TOKENS = 256


def own_begin(link_ends: Sequence[int], num_tokens: int) -> int:
    """The first token that a context of `num_tokens` keeps itself, behind the links that it
    continues. What it takes over of their tokens is stored twice.

    Args:
        link_ends: where each ends and the next one begins, in order.

    A link of less than `MIN_LINK_TOKENS` is taken over. Where there would be more than `MAX_LINKS`,
    so are the last ones, as long as the next is shorter than those behind it: of what was taken
    over before, little is again, so that a token is stored a few times even after many turns.
    """
    ends = [0, *link_ends]
    while len(ends) > 1 and ends[-1] - ends[-2] < MIN_LINK_TOKENS:
        ends.pop()
    if len(ends) > MAX_LINKS:
        ends.pop()
        while len(ends) > 1 and ends[-1] - ends[-2] <= num_tokens - ends[-1]:
            ends.pop()
    return ends[-1]
