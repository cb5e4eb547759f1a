# SPDX-License-Identifier: Apache-2.0
"""Which tokens query tokens do not see, where the Triton kernels read it.

Each set of hidden tokens is a row of bits, and each query token names a row or none. So groups are
found by physical blocks alone: members of a group may hide different tokens of a block they share.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vllm_relay.attention_backends.cuda.copies import upload
from vllm_relay.attention_backends.hidden_tokens import Ranges

WORD_TOKENS = 64
SEES_ALL = -1
"""Instead of a row of bits."""

HiddenRun = tuple[int, int, Ranges]
"""First query token and end of those in a row that hide the same, and what they hide."""


def bits_of(hidden: Sequence[Ranges], num_tokens: int) -> np.ndarray:
    """A row for each, bit t % 64 of word t // 64 set for a hidden token t.

    Args:
        num_tokens: that a row tells about.

    Returns:
        int64 [rows, words].
    """
    num_words = -(-num_tokens // WORD_TOKENS)
    is_hidden = np.zeros((len(hidden), num_words * WORD_TOKENS), bool)
    for row, ranges in zip(is_hidden, hidden, strict=True):
        for begin, end in ranges:
            row[begin:end] = True
    return np.packbits(is_hidden, axis=1, bitorder="little").view("<i8")


def bits_and_rows(
    runs: Sequence[HiddenRun], num_query_tokens: int, num_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """What a plan made on the host has: int64 [rows, words] of `bits_of`, and int32 [query tokens]
    of the row of each, or SEES_ALL.

    Args:
        num_tokens: that any query token may see.
    """
    row_of_token = np.full(num_query_tokens, SEES_ALL, np.int32)
    for row, (begin, end, _) in enumerate(runs):
        row_of_token[begin:end] = row
    return bits_of([ranges for _, _, ranges in runs], num_tokens), row_of_token


class HiddenBits:
    """Buffers that stay where they are, for the steps of one planner.

    A row is uploaded when it is first needed, and kept until others need its place.

    Args:
        num_rows: sets of hidden tokens in a step, at most.
        num_tokens: query tokens of a step, at most.
        max_seq_len: tokens of a request, at most.
    """

    def __init__(
        self, num_rows: int, num_tokens: int, max_seq_len: int, device: torch.device
    ) -> None:
        self.device = device
        self.max_seq_len = max_seq_len
        words = -(-max_seq_len // WORD_TOKENS)
        self.bits = torch.zeros((num_rows, words), dtype=torch.int64, device=device)
        """int64 [rows, words], as `bits_of`."""
        self.row_of_token = torch.full((num_tokens,), SEES_ALL, dtype=torch.int32, device=device)
        """int32 [query tokens]: a row of `bits`, or SEES_ALL."""
        self._rows: dict[int, tuple[int, Ranges]] = {}  # by id, which its ranges keep taken
        self._uploaded: list[tuple[int, int, int]] = []

    def update(self, runs: Sequence[HiddenRun]) -> None:
        """Takes over what the query tokens of a step hide; those in no run see everything. Uploads
        nothing where the step before was the same.

        Args:
            runs: of query tokens, without overlap; ranges are compared by identity, so that a
                request should keep its own.

        Raises:
            ValueError: more sets of hidden tokens than there are rows.
        """
        self._keep({id(ranges): ranges for _, _, ranges in runs})
        named = [(begin, end, self._rows[id(ranges)][0]) for begin, end, ranges in runs]
        if named == self._uploaded:
            return
        row_of_token = np.full(len(self.row_of_token), SEES_ALL, np.int32)
        for begin, end, row in named:
            row_of_token[begin:end] = row
        self.row_of_token.copy_(upload(row_of_token, self.device), non_blocking=True)
        self._uploaded = named

    def _keep(self, needed: dict[int, Ranges]) -> None:
        new = [ranges for key, ranges in needed.items() if key not in self._rows]
        if not new:
            return
        num_rows = len(self.bits)
        if len(needed) > num_rows:
            raise ValueError(f"{len(needed)} sets of hidden tokens in a step, room for {num_rows}")
        taken = {row for row, _ in self._rows.values()}
        free = [row for row in range(num_rows) if row not in taken]
        for key in [key for key in self._rows if key not in needed]:
            if len(free) >= len(new):
                break
            free.append(self._rows.pop(key)[0])
        rows = np.array(free[: len(new)], np.int64)
        bits = upload(bits_of(new, self.max_seq_len), self.device)
        self.bits.index_copy_(0, upload(rows, self.device), bits)
        for row, ranges in zip(rows.tolist(), new, strict=True):
            self._rows[id(ranges)] = row, ranges
