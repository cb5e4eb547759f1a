# SPDX-License-Identifier: Apache-2.0
"""Many token sequences in one array, and how much of their beginnings they share."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

_SEQUENCES_PER_PART = 1024

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TokenSequences:
    """
    Attributes:
        tokens: uint32 [tokens of all sequences].
        offsets: int64 [sequences + 1]; sequence i is ``tokens[offsets[i] : offsets[i + 1]]``.
    """

    tokens: npt.NDArray[np.uint32]
    offsets: Int64

    @classmethod
    def from_lists(cls, sequences: Iterable[Sequence[int]]) -> TokenSequences:
        """
        Raises:
            ValueError: a token is negative or takes more than 32 bits.
        """
        listed = list(sequences)
        offsets = _offsets(np.fromiter(map(len, listed), np.int64, len(listed)))
        packed = [each for each in listed if isinstance(each, array) and each.typecode == "I"]
        if len(packed) == len(listed):
            parts = [np.empty(0, np.uint32), *(np.frombuffer(each, np.uint32) for each in packed)]
            return cls(np.concatenate(parts), offsets)
        wide = np.fromiter(chain.from_iterable(listed), np.int64, int(offsets[-1]))
        if len(wide) and not 0 <= wide.min() <= wide.max() < 1 << 32:
            raise ValueError(
                f"tokens from {wide.min()} to {wide.max()} given, expected 0 to {(1 << 32) - 1}: "
                f"give token ids of a vocabulary"
            )
        return cls(wide.astype(np.uint32), offsets)

    @classmethod
    def from_texts(cls, texts: Sequence[str]) -> TokenSequences:
        """Every character is a token."""
        encoded = "".join(texts).encode("utf-32-le", "surrogatepass")
        offsets = _offsets(np.fromiter(map(len, texts), np.int64, len(texts)))
        return cls(np.frombuffer(encoded, np.dtype("<u4")).astype(np.uint32, copy=False), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Int64:
        """Tokens of each sequence, int64 [sequences]."""
        return np.diff(self.offsets)

    def __getitem__(self, index: int) -> npt.NDArray[np.uint32]:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def take(self, indices: npt.ArrayLike) -> TokenSequences:
        """The sequences of these indices, in this order."""
        chosen = np.asarray(indices, np.int64)
        lengths = self.lengths[chosen]
        offsets = _offsets(lengths)
        tokens = np.empty(int(offsets[-1]), np.uint32)
        # positions take several times the memory of tokens
        for begin in range(0, len(chosen), _SEQUENCES_PER_PART):
            part = slice(begin, begin + _SEQUENCES_PER_PART)
            found = self.tokens[gather_indices(self.offsets[chosen[part]], lengths[part])]
            tokens[offsets[begin] : offsets[begin] + len(found)] = found
        return TokenSequences(tokens, offsets)

    def surrounded(self, before: Sequence[int], after: Sequence[int]) -> TokenSequences:
        """Every sequence with the same tokens in front of it and behind it."""
        ends = TokenSequences.from_lists([before, after])
        pool = np.concatenate([self.tokens, ends.tokens])
        begins = np.empty((len(self), 3), np.int64)
        lengths = np.empty((len(self), 3), np.int64)
        begins[:, 0], lengths[:, 0] = len(self.tokens), len(before)
        begins[:, 1], lengths[:, 1] = self.offsets[:-1], self.lengths
        begins[:, 2], lengths[:, 2] = len(self.tokens) + len(before), len(after)
        tokens = pool[gather_indices(begins.ravel(), lengths.ravel())]
        return TokenSequences(tokens, _offsets(lengths.sum(axis=1)))

    def sorted_indices(self) -> Int64:
        """Indices that sort the sequences lexicographically, int64 [sequences]."""
        keys = self.tokens.astype(_narrowest(self.tokens)).tobytes()
        width = len(keys) // max(len(self.tokens), 1)
        bounds = (self.offsets * width).tolist()
        # big-endian bytes compare as the tokens do
        parts = [keys[begin:end] for begin, end in zip(bounds, bounds[1:], strict=False)]
        return np.array(sorted(range(len(parts)), key=parts.__getitem__), np.int64)

    def shared_with_previous(self) -> Int64:
        """Tokens that each sequence's beginning shares with the one before it, int64 [sequences].

        The first shares none.
        """
        shared = np.zeros(len(self), np.int64)
        if len(self) < 2:
            return shared
        lengths = self.lengths
        limits = np.minimum(lengths[1:], lengths[:-1])
        active = np.flatnonzero(limits > 0)
        previous, current = self.offsets[active], self.offsets[active + 1]
        limits, depth = limits[active], 0
        while len(active):
            equal = self.tokens[previous + depth] == self.tokens[current + depth]
            depth += 1
            ended = ~equal | (limits == depth)
            shared[active[ended] + 1] = depth - (~equal[ended]).astype(np.int64)
            kept = ~ended
            active, previous, current = active[kept], previous[kept], current[kept]
            limits = limits[kept]
        return shared

    def total_shared(self) -> int:
        """Tokens that a cache for all of them would not compute again, in whichever order.

        The sum over sequences of the longest beginning that an earlier one has.
        """
        return int(self.take(self.sorted_indices()).shared_with_previous().sum())


def gather_indices(begins: Int64, lengths: Int64) -> Int64:
    """Indices of ranges one after the other: int64 [sum of lengths]."""
    targets = np.cumsum(lengths) - lengths
    return np.repeat(begins - targets, lengths) + np.arange(int(lengths.sum()))


def _offsets(lengths: Int64) -> Int64:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _narrowest(tokens: npt.NDArray[np.uint32]) -> str:
    largest = int(tokens.max()) if len(tokens) else 0
    return ">u1" if largest < 1 << 8 else ">u2" if largest < 1 << 16 else ">u4"
