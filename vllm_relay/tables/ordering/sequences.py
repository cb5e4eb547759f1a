# SPDX-License-Identifier: Apache-2.0
"""Many token sequences in one array, and how much of their beginnings they share."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

_TOKENS_PER_PART = 1 << 15
_FIRST_KEY_TOKENS = 16
_WIDTH = 4
"""Bytes of a number in a key."""

Int64 = npt.NDArray[np.int64]
UInt32 = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class TokenSequences:
    """
    Attributes:
        tokens: uint32 [tokens], those of all sequences.
        begins, lengths: int64 [sequences]; sequence i is
            ``tokens[begins[i] : begins[i] + lengths[i]]``.
    """

    tokens: UInt32
    begins: Int64
    lengths: Int64

    @classmethod
    def from_lists(cls, sequences: Iterable[Sequence[int]]) -> TokenSequences:
        """
        Raises:
            ValueError: a token is negative or takes more than 32 bits.
        """
        tokens, lengths = array("I"), array("q")
        for each in sequences:
            try:
                tokens.extend(each)
            except OverflowError:
                raise ValueError(
                    f"tokens from {min(each)} to {max(each)} given, expected 0 to {(1 << 32) - 1}: "
                    f"give token ids of a vocabulary"
                ) from None
            lengths.append(len(each))
        return cls.back_to_back(np.frombuffer(tokens, np.uint32), np.frombuffer(lengths, np.int64))

    @classmethod
    def from_texts(cls, texts: Sequence[str]) -> TokenSequences:
        """Every character is a token."""
        encoded = "".join(texts).encode("utf-32-le", "surrogatepass")
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        tokens = np.frombuffer(encoded, np.dtype("<u4")).astype(np.uint32, copy=False)
        return cls.back_to_back(tokens, lengths)

    @classmethod
    def back_to_back(cls, tokens: UInt32, lengths: Int64) -> TokenSequences:
        """Sequences of these lengths, each of which begins where the one before it ends."""
        return cls(tokens, np.cumsum(lengths) - lengths, lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> UInt32:
        begin = self.begins[index]
        return self.tokens[begin : begin + self.lengths[index]]

    def take(self, indices: npt.ArrayLike) -> TokenSequences:
        """The sequences of these indices, in this order; the tokens stay where they are."""
        chosen = np.asarray(indices, np.int64)
        return TokenSequences(self.tokens, self.begins[chosen], self.lengths[chosen])

    def copy_to(self, target: UInt32, target_begins: Int64) -> None:
        """Put the sequences into an array.

        Args:
            target_begins: where each of them goes, int64 [sequences].
        """
        for part in _parts(self.lengths):
            lengths = self.lengths[part]
            found = self.tokens[gather_indices(self.begins[part], lengths)]
            target[gather_indices(target_begins[part], lengths)] = found

    def sorted_indices(self) -> Int64:
        """Indices that sort the sequences lexicographically, int64 [sequences]."""
        order = np.arange(len(self))
        # places in the order that are not decided yet, and groups of those with equal beginnings
        places, groups = order.copy(), np.zeros(len(self), np.int64)
        depth, num_tokens = 0, _FIRST_KEY_TOKENS
        while len(places):
            undecided = order[places]
            keys = self._keys(undecided, groups, depth, num_tokens)
            by_key = sorted(range(len(keys)), key=keys.__getitem__)
            order[places] = undecided[by_key]
            whole = _WIDTH * (1 + num_tokens)
            ranked = (keys[each] for each in by_key)
            goes_on = np.array([a == b and len(a) == whole for a, b in pairwise(ranked)], np.bool_)
            is_left = np.concatenate([goes_on, [False]]) | np.concatenate([[False], goes_on])
            groups = np.cumsum(np.concatenate([[False], ~goes_on]))[is_left]
            places = places[is_left]
            depth, num_tokens = depth + num_tokens, 2 * num_tokens
        return order

    def _keys(self, indices: Int64, groups: Int64, depth: int, num_tokens: int) -> list[bytes]:
        """Of each its group and as many tokens from `depth` on: big-endian bytes compare as the
        numbers do."""
        begins = self.begins[indices] + depth
        lengths = np.clip(self.lengths[indices] - depth, 0, num_tokens)
        keys: list[bytes] = []
        for part in _parts(lengths):
            tokens = self.tokens[gather_indices(begins[part], lengths[part])]
            packed = tokens.astype(">u4").tobytes()
            ends = (np.cumsum(lengths[part]) * _WIDTH).tolist()
            numbers = groups[part].astype(">u4").tobytes()
            for place, (begin, end) in enumerate(pairwise([0, *ends])):
                keys.append(numbers[place * _WIDTH : (place + 1) * _WIDTH] + packed[begin:end])
        return keys

    def shared_with_previous(self) -> Int64:
        """Tokens that each sequence's beginning shares with the one before it, int64 [sequences].

        The first shares none.
        """
        shared = np.zeros(len(self), np.int64)
        if len(self) < 2:
            return shared
        limits = np.minimum(self.lengths[1:], self.lengths[:-1])
        active = np.flatnonzero(limits > 0)
        previous, current = self.begins[active], self.begins[active + 1]
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


def _parts(lengths: Int64) -> Iterator[slice]:
    """Sequences with `_TOKENS_PER_PART` tokens together, about: indices of tokens take several
    times the memory of the tokens."""
    ends = np.cumsum(lengths)
    begin = 0
    while begin < len(lengths):
        before = int(ends[begin - 1]) if begin else 0
        end = int(np.searchsorted(ends, before + _TOKENS_PER_PART, "right"))
        end = min(max(end, begin + 1), begin + _TOKENS_PER_PART)
        yield slice(begin, end)
        begin = end
