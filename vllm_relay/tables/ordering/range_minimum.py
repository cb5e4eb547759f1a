# SPDX-License-Identifier: Apache-2.0
"""The least number of a range, for many ranges at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_BLOCK = 16


class RangeMinimum:
    """Minima of ranges of an array, in about three times its memory.

    Args:
        values: integers [n].
    """

    def __init__(self, values: npt.NDArray[np.integer]) -> None:
        self._values = values
        num_blocks = -(-len(values) // _BLOCK)
        padded = np.full(num_blocks * _BLOCK, np.iinfo(values.dtype).max, values.dtype)
        padded[: len(values)] = values
        blocks = padded.reshape(num_blocks, _BLOCK)
        self._from_block_begin = np.minimum.accumulate(blocks, axis=1).ravel()
        self._to_block_end = np.minimum.accumulate(blocks[:, ::-1], axis=1)[:, ::-1].ravel()
        # level k: minima of 2**k blocks
        self._levels = [blocks.min(axis=1)]
        while 2 << (len(self._levels) - 1) <= num_blocks:
            last, step = self._levels[-1], 1 << (len(self._levels) - 1)
            self._levels.append(np.minimum(last[:-step], last[step:]))

    def query(self, first: npt.NDArray[np.int64], last: npt.NDArray[np.int64]) -> npt.NDArray:
        """
        Args:
            first, last: bounds of ranges, both inclusive, first <= last, int64 [ranges].

        Returns:
            minima, of the values' dtype, [ranges].
        """
        minima = self._values[first].copy()
        wide = np.flatnonzero(last > first)
        if len(wide) == 0:
            return minima
        begin, end = first[wide], last[wide]
        same_block = begin // _BLOCK == end // _BLOCK
        found = np.empty(len(wide), self._values.dtype)
        found[same_block] = self._within_block(begin[same_block], end[same_block])
        apart = ~same_block
        found[apart] = self._across_blocks(begin[apart], end[apart])
        minima[wide] = found
        return minima

    def _within_block(
        self, first: npt.NDArray[np.int64], last: npt.NDArray[np.int64]
    ) -> npt.NDArray:
        minima = self._values[first]
        for step in range(1, _BLOCK):
            np.minimum(minima, self._values[np.minimum(first + step, last)], out=minima)
        return minima

    def _across_blocks(
        self, first: npt.NDArray[np.int64], last: npt.NDArray[np.int64]
    ) -> npt.NDArray:
        minima = np.minimum(self._to_block_end[first], self._from_block_begin[last])
        begin, end = first // _BLOCK + 1, last // _BLOCK
        between = np.flatnonzero(end > begin)
        # exact for integers below 2**53
        level = np.frexp((end - begin)[between])[1] - 1
        for number in np.unique(level):
            chosen = between[level == number]
            table, step = self._levels[number], 1 << int(number)
            inner = np.minimum(table[begin[chosen]], table[end[chosen] - step])
            minima[chosen] = np.minimum(minima[chosen], inner)
        return minima
