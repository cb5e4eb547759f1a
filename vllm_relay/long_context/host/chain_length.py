# SPDX-License-Identifier: Apache-2.0
"""How many links the chain of a context may have: each is searched by itself in every step."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_relay.sparse.contexts.context_store import Link

MAX_LINKS = 32
MIN_LINK_TOKENS = 256


def own_begin(links: Sequence[Link], num_tokens: int) -> int:
    """The first token that a context of `num_tokens` keeps itself, behind the links that it
    continues, in order. What it takes over of their tokens is stored twice.

    A link of less than `MIN_LINK_TOKENS` is taken over. Where there would be more than `MAX_LINKS`,
    so are the last ones, as long as the next is shorter than those behind it: of what was taken
    over before, little is again, so that a token is stored a few times even after many turns.
    """
    left = list(links)
    while left and left[-1].end - left[-1].begin < MIN_LINK_TOKENS:
        left.pop()
    if len(left) >= MAX_LINKS:
        left.pop()
        while left and left[-1].end - left[-1].begin <= num_tokens - left[-1].end:
            left.pop()
    return left[-1].end if left else 0
