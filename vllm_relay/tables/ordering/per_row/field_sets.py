# SPDX-License-Identifier: Apache-2.0
"""Which field comes next, given which came before: dynamic programming over sets of fields.

Rows that agree in a set of fields can share a beginning made of these fields, in whatever order. A
state is a set of fields with its groups of rows. The tokens that a group can save are those that
its best next field saves and what its parts save from there on; so every group has its own order.
Only the sets that save most are followed. It is exact over all orders in which rows that share a
beginning go on with the same field, if all sets are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vllm_relay.tables.ordering.columns import Column
from vllm_relay.tables.ordering.per_row.groups import saved_tokens, split

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]


@dataclass
class FieldSet:
    """A set of fields that come first, and the groups of two rows and more that agree in them.

    Attributes:
        fields: the set, a bit per column.
        rows: those in groups, int32.
        group_of_row: int32 [rows of the table], -1 outside of groups.
        some_row: of each group, int32 [groups].
        saved_before: tokens that the best single order of these fields saves.
        next_field: the best for each group, int16 [groups]; -1 saves nothing.
        saved: tokens that each group saves from here on, float64 [groups].
    """

    fields: int
    rows: Int32
    group_of_row: Int32
    some_row: Int32
    saved_before: float
    next_field: npt.NDArray[np.int16]
    saved: Float64
    gains: dict[int, npt.NDArray[np.float32]] = field(default_factory=dict)

    @property
    def num_groups(self) -> int:
        return len(self.some_row)

    @property
    def groups(self) -> Int32:
        """Group of each of `rows`."""
        return self.group_of_row[self.rows]

    def choose(self, column: int, gains: npt.NDArray[np.floating]) -> None:
        """Take a column as the next one of the groups that it saves more for."""
        better = gains > self.saved
        self.saved[better] = gains[better]
        self.next_field[better] = column


@dataclass(frozen=True)
class _Candidate:
    saved_before: float
    source: FieldSet
    column: int


class FieldSets:
    """The sets of fields that are followed.

    Args:
        columns: of distinct rows.
        determines: functional dependencies, bool [columns, columns].
        always: an order of columns; the sets along it are followed in any case.
        width: sets of each size that are followed.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        determines: npt.NDArray[np.bool_],
        always: Sequence[int],
        width: int,
    ) -> None:
        self.columns = columns
        self.sets: dict[int, FieldSet] = {}
        self._determines = determines
        self._width = width
        self._num_rows = len(columns[0].codes)
        self._along: set[int] = {0}
        fields = 0
        for column in always:
            fields = self.with_field(fields, column)
            self._along.add(fields)
        self._follow_and_expand()
        for one in sorted(self.sets.values(), key=lambda each: -each.fields.bit_count()):
            self._choose_next(one)

    def dependents(self, fields: int, column: int) -> list[int]:
        """Columns outside of a set that a column determines: they follow it at no cost."""
        found = np.flatnonzero(self._determines[column]).tolist()
        return [other for other in found if not fields >> other & 1]

    def with_field(self, fields: int, column: int) -> int:
        """A set with one more column and all that it determines."""
        for other in [column, *self.dependents(fields, column)]:
            fields |= 1 << other
        return fields

    def _follow_and_expand(self) -> None:
        candidates: list[dict[int, _Candidate]] = [{} for _ in range(len(self.columns) + 1)]
        everything = np.arange(self._num_rows, dtype=np.int32)
        whole = np.zeros(self._num_rows, np.int64)
        self._add(0, 0.0, everything, whole, int(self._num_rows > 1))
        for size in range(len(self.columns)):
            best = sorted(candidates[size].items(), key=lambda item: -item[1].saved_before)
            for rank, (fields, candidate) in enumerate(best):
                if rank < self._width or fields in self._along:
                    self._follow(fields, candidate)
            for one in [each for each in self.sets.values() if each.fields.bit_count() == size]:
                self._expand(one, candidates)
            candidates[size].clear()

    def _follow(self, fields: int, candidate: _Candidate) -> None:
        source, column = candidate.source, self.columns[candidate.column]
        codes = column.codes[source.rows]
        children = split(source.groups, source.num_groups, codes, column.num_values, True)
        shared = children.counts > 1
        in_group = shared[children.of_rows]
        numbers = np.cumsum(shared) - 1
        self._add(
            fields,
            candidate.saved_before,
            source.rows[in_group],
            numbers[children.of_rows[in_group]],
            int(np.count_nonzero(shared)),
        )

    def _add(
        self, fields: int, saved_before: float, rows: Int32, groups: Int64, num_groups: int
    ) -> None:
        if num_groups == 0:
            return
        group_of_row = np.full(self._num_rows, -1, np.int32)
        group_of_row[rows] = groups
        some_row = np.empty(num_groups, np.int32)
        some_row[groups] = rows
        self.sets[fields] = FieldSet(
            fields=fields,
            rows=rows,
            group_of_row=group_of_row,
            some_row=some_row,
            saved_before=saved_before,
            next_field=np.full(num_groups, -1, np.int16),
            saved=np.zeros(num_groups),
        )

    def _expand(self, source: FieldSet, candidates: list[dict[int, _Candidate]]) -> None:
        groups = source.groups
        for number, column in enumerate(self.columns):
            if source.fields >> number & 1:
                continue
            codes = column.codes[source.rows]
            children = split(groups, source.num_groups, codes, column.num_values)
            lengths = self._lengths_with_dependents(source.fields, number)
            gains = saved_tokens(column, lengths, children, source.num_groups)
            if children.counts.max() == 1:
                source.choose(number, gains)
                continue
            source.gains[number] = gains.astype(np.float32)
            fields = self.with_field(source.fields, number)
            saved = source.saved_before + float(gains.sum())
            known = candidates[fields.bit_count()].get(fields)
            if known is None or saved > known.saved_before:
                candidates[fields.bit_count()][fields] = _Candidate(saved, source, number)

    def _lengths_with_dependents(self, fields: int, number: int) -> Int64:
        column = self.columns[number]
        dependents = self.dependents(fields, number)
        if not dependents:
            return column.lengths
        some_row = np.zeros(column.num_values, np.int64)
        some_row[column.codes] = np.arange(self._num_rows)
        lengths = column.lengths.copy()
        for other in dependents:
            lengths += self.columns[other].lengths[self.columns[other].codes[some_row]]
        return lengths

    def _choose_next(self, one: FieldSet) -> None:
        for column, gains in one.gains.items():
            target = self.sets.get(self.with_field(one.fields, column))
            total = gains.astype(np.float64)
            if target is not None:
                parents = one.group_of_row[target.some_row]
                total += np.bincount(parents, weights=target.saved, minlength=one.num_groups)
            one.choose(column, total)
        one.gains.clear()
