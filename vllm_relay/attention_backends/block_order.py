# SPDX-License-Identifier: Apache-2.0
"""The KV blocks of one KV cache group's requests, and an order in which those that begin alike are
neighbours.

The order is kept from step to step. A request that begins is sorted in, and what is said of the
others stays true: so a step in which one request begins costs one search, not a sort of all.

Pure: numpy in, numpy out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_relay.attention_backends.forest import NULL_BLOCK, Forest, build_forest, sort_rows

_FIRST_ROWS, _FIRST_BLOCKS = 64, 256
_FEW = 16
"""One of so many rows is sorted in by itself; more are sorted together with the others."""


class BlockOrder:
    """Rows of a block table that grow behind, and may be taken by others."""

    def __init__(self) -> None:
        self._table = np.zeros((_FIRST_ROWS, _FIRST_BLOCKS), np.int32)
        self._lens = np.zeros(_FIRST_ROWS, np.int64)
        self._ends = np.zeros(_FIRST_ROWS, np.int64)
        """Up to the first null block, which nobody shares."""
        self._alike = np.zeros(_FIRST_ROWS, np.int64)
        """Blocks with which a row and any other begin, at most."""
        self._sorted: list[int] = []
        self._common: list[int] = []
        """Blocks with which a row of `_sorted` and the one before it begin."""
        self._unsorted: set[int] = set()

    def begin(self, row: int, block_ids: Sequence[int]) -> None:
        """A request that has these blocks takes a free row."""
        while row >= len(self._lens):
            for name in ("_table", "_lens", "_ends", "_alike"):
                array = getattr(self, name)
                setattr(self, name, np.concatenate((array, np.zeros_like(array))))
        self._lens[row] = self._ends[row] = self._alike[row] = 0
        self._unsorted.add(row)
        self.append(row, block_ids)

    def append(self, row: int, block_ids: Sequence[int]) -> None:
        """The request of a row has these blocks behind those it had."""
        begin = int(self._lens[row])
        end = begin + len(block_ids)
        if end > self._table.shape[1]:
            more = max(end - self._table.shape[1], self._table.shape[1])
            self._table = np.pad(self._table, ((0, 0), (0, more)))
        added = self._table[row, begin:end]
        added[:] = np.fromiter(block_ids, np.int32, len(block_ids))
        self._lens[row] = end
        if self._ends[row] < begin:
            return
        is_null = added == NULL_BLOCK
        self._ends[row] = begin + int(is_null.argmax()) if is_null.any() else end
        # one that others go on from may go on as they do
        if row not in self._unsorted and self._alike[row] == begin:
            self._take_out(row)
            self._unsorted.add(row)

    def end(self, row: int) -> None:
        """A row is free again."""
        if row in self._unsorted:
            self._unsorted.remove(row)
        elif row in self._sorted:
            self._take_out(row)

    def rows(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """
        Returns:
            block_table: int32 [rows, blocks]; behind those of a request anything may stand.
            num_blocks: int64 [rows], 0 where a row is -1.
        """
        num_blocks = self.num_blocks(rows)
        return self._table[rows, : int(num_blocks.max(initial=0))], num_blocks

    def num_blocks(self, rows: np.ndarray) -> np.ndarray:
        """int64 [rows], 0 where a row is -1."""
        return np.where(rows < 0, 0, self._lens[rows])

    def forest(self, rows: np.ndarray, shareable_tokens: np.ndarray, block_size: int) -> Forest:
        """As `build_forest` of these rows, but that requests share nothing whose tokens end within
        what they have in common with others.

        Args:
            rows: int [requests], all different, or -1 for requests that share nothing.
            shareable_tokens: int [requests]: how many leading tokens a request may share.
            block_size: tokens per block.
        """
        limits = np.where(rows < 0, 0, np.minimum(shareable_tokens // block_size, self._lens[rows]))
        if (self._table[rows[limits > 0], 0] == NULL_BLOCK).any():
            table, num_blocks = self.rows(rows)
            tokens = np.minimum(shareable_tokens, num_blocks * block_size)
            return build_forest(table, tokens, block_size)
        self._sort_in()
        request_of = np.full(len(self._lens), -1)
        sharing = np.flatnonzero(limits > 0)
        request_of[rows[sharing]] = sharing
        requests = request_of[self._sorted]
        places = np.flatnonzero(requests >= 0)
        common = self._common_at(places)
        if not common.any():
            return Forest.none(len(rows))
        most_common = np.maximum(np.append(0, common), np.append(common, 0))[: len(places)]
        is_long = limits[requests[places]] >= most_common
        if not is_long.all():
            places = places[is_long]
            common = self._common_at(places)
        order = requests[places]
        is_in = np.zeros(len(rows), bool)
        is_in[order] = True
        order = np.concatenate((order, np.flatnonzero(~is_in)))
        common = np.append(common, np.zeros(max(len(order) - 1 - len(common), 0), np.int64))
        return Forest.of_neighbours(order, common, block_size)

    def _common_at(self, places: np.ndarray) -> np.ndarray:
        """int [places - 1]: blocks with which each of `_sorted` at these places and the next one
        begin."""
        if len(places) < 2:
            return np.empty(0, np.int64)
        return np.minimum.reduceat(np.array(self._common)[: places[-1] + 1], places[:-1] + 1)

    def _sort_in(self) -> None:
        if len(self._unsorted) * _FEW > len(self._sorted):
            rows = np.array([*self._sorted, *self._unsorted])
            order, common = sort_rows(self._table[rows], self._ends[rows])
            self._sorted, self._common = rows[order].tolist(), [0, *common.tolist()]
            self._alike[self._sorted] = np.maximum(self._common, [*self._common[1:], 0])
        else:
            for row in self._unsorted:
                self._insert(row)
        self._unsorted.clear()

    def _insert(self, row: int) -> None:
        first, last = 0, len(self._sorted)
        before = after = 0
        while first < last:
            middle = (first + last) // 2
            common, comes_before = self._compare(row, self._sorted[middle])
            if comes_before:
                last, after = middle, common
            else:
                first, before = middle + 1, common
        self._sorted.insert(first, row)
        self._common.insert(first, before)
        if first + 1 < len(self._sorted):
            self._common[first + 1] = after
        for place in range(max(first, 1), min(first + 2, len(self._sorted))):
            for each in self._sorted[place - 1 : place + 1]:
                self._alike[each] = max(self._alike[each], self._common[place])

    def _compare(self, row: int, other: int) -> tuple[int, bool]:
        """Blocks in common, and whether the row comes before the other."""
        size = int(min(self._ends[row], self._ends[other]))
        theirs = self._table[row, :size], self._table[other, :size]
        differs = np.not_equal(*theirs)
        common = int(differs.argmax()) if size else 0
        if size and differs[common]:
            own_id, other_id = (ids[common].tobytes() for ids in theirs)
            return common, own_id < other_id
        return size, bool(self._ends[row] < self._ends[other])

    def _take_out(self, row: int) -> None:
        place = self._sorted.index(row)
        del self._sorted[place]
        common = self._common.pop(place)
        if place < len(self._common):
            self._common[place] = min(self._common[place], common)
