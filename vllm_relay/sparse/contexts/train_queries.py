# SPDX-License-Identifier: Apache-2.0
"""Which queries an index learns from: an even sample over tokens and query heads."""

from __future__ import annotations

import math
from fractions import Fraction

import torch

NUM_LAST_TOKENS = 192
"""Tokens of which all queries are kept: those that plans go by."""


class TrainQueries:
    """Takes `per_key` queries for each token, in token order, from the query heads of a group in
    turn.

    Attributes:
        group: query heads that share a kv head; 1 as long as there were none.

    Which ones does not depend on how the tokens are cut into forward passes.

    Source: AlayaDB (2504.10326), section 7.2, index sharing.
    """

    def __init__(self, per_key: float | Fraction) -> None:
        self._per_key = per_key
        self.group = 1
        self._end = 0
        self._positions: list[int] = []
        self._parts: list[torch.Tensor] = []
        self._last: list[torch.Tensor] = []

    def add(self, queries: torch.Tensor, *, first_position: int) -> None:
        """Args: queries: [kv_heads, group, tokens, head_size]; tokens seen before are skipped."""
        group, num_tokens = queries.shape[1], queries.shape[2]
        self.group = group
        begin = max(first_position, self._end)
        self._end = max(self._end, first_position + num_tokens)
        self._keep_last(queries[:, :, begin - first_position :])
        chosen = [
            (position, number)
            for position in range(begin, first_position + num_tokens)
            for number in range(self._count(position), self._count(position + 1))
        ]
        if not chosen:
            return
        positions, numbers = zip(*chosen, strict=True)
        tokens = torch.tensor(positions) - first_position
        heads = torch.tensor(numbers) % group
        self._parts.append(queries[:, heads, tokens].detach().to("cpu", copy=True))
        self._positions.extend(positions)

    def sample(self) -> torch.Tensor | None:
        """[kv_heads, m, head_size] in token order; None if there are none."""
        if not self._parts:
            return None
        return torch.cat(self._parts, 1)[:, : len(self._positions)]

    def last(self) -> torch.Tensor | None:
        """[kv_heads, tokens, group, head_size], of the last `NUM_LAST_TOKENS` tokens, or of those
        since tokens were forgotten; None if there are none."""
        if not self._last:
            return None
        return torch.cat(self._last, 2)[:, :, -NUM_LAST_TOKENS:].transpose(1, 2)

    def _keep_last(self, queries: torch.Tensor) -> None:
        if not queries.shape[2]:
            return
        self._last.append(queries[:, :, -NUM_LAST_TOKENS:].detach().to("cpu", copy=True))
        num_tokens = sum(part.shape[2] for part in self._last)
        while num_tokens - self._last[0].shape[2] >= NUM_LAST_TOKENS:
            num_tokens -= self._last.pop(0).shape[2]

    def crop(self, num_tokens: int) -> None:
        """Forgets the queries of tokens at `num_tokens` and after."""
        if num_tokens < self._end:
            self._last = []
        self._positions = [p for p in self._positions if p < num_tokens]
        self._end = min(self._end, num_tokens)
        sample = self.sample()
        self._parts = [] if sample is None or not self._positions else [sample]

    def copy(self) -> TrainQueries:
        twin = TrainQueries(self._per_key)
        twin.group = self.group
        twin._end, twin._positions = self._end, list(self._positions)
        twin._parts = list(self._parts)
        twin._last = list(self._last)
        return twin

    def _count(self, num_tokens: int) -> int:
        """How many queries the first `num_tokens` tokens give."""
        return math.floor(num_tokens * self._per_key)
