# SPDX-License-Identifier: Apache-2.0
"""Rows of the same beginning that go on with different fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_relay.tables.ordering.columns import Column
from vllm_relay.tables.ordering.per_row.groups import Children, neighbor_tokens, saved_tokens, split

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]


class FieldPositions:
    """Where the fields of each row stand. Those not yet placed follow in a given order.

    Args:
        ranked: that order, a permutation of the columns.
    """

    def __init__(self, num_rows: int, ranked: npt.NDArray[np.int16]) -> None:
        self._unplaced = np.empty(len(ranked), np.int16)
        self._unplaced[ranked] = np.arange(len(ranked), 2 * len(ranked))
        self._positions = np.tile(self._unplaced, (num_rows, 1))

    def place(self, rows: npt.NDArray[np.integer], column: int, position: int | Int64) -> None:
        self._positions[rows, column] = position

    def remove(self, rows: npt.NDArray[np.integer], columns: Int64) -> None:
        self._positions[rows, columns] = self._unplaced[columns]

    def fields(self) -> npt.NDArray[np.int16]:
        """The columns of each row in their order, int16 [rows, columns]."""
        return np.argsort(self._positions, axis=1, kind="stable").astype(np.int16)


@dataclass(frozen=True)
class Nodes:
    """Groups of rows with an equal beginning.

    Attributes:
        rows: [rows].
        groups: of each row, [rows].
        used: columns that are placed or of no use, bool [groups, columns].
        depth: the position of the next field, int64 [groups].
        tentative: the column that stands there until a better one is found, int64 [groups]; -1 is
            none.
        at_stake: tokens that it saves, float64 [groups].
    """

    rows: npt.NDArray[np.integer]
    groups: Int64
    used: Bool
    depth: Int64
    tentative: Int64
    at_stake: npt.NDArray[np.float64]

    @classmethod
    def of(
        cls,
        rows: npt.NDArray[np.integer],
        groups: npt.NDArray[np.integer],
        used: Bool,
        depth: int | Int64,
        tentative: int = -1,
        at_stake: npt.NDArray[np.float64] | None = None,
    ) -> Nodes:
        """Numbers groups without gaps.

        Args:
            used: [columns], or [groups, columns] by the groups' old numbers.
            depth, at_stake: by the groups' old numbers.
        """
        numbers, dense = np.unique(groups, return_inverse=True)
        count = len(numbers)
        return cls(
            rows,
            dense.astype(np.int64),
            np.tile(used, (count, 1)) if used.ndim == 1 else used[numbers],
            np.full(count, depth) if isinstance(depth, int) else depth[numbers],
            np.full(count, tentative),
            np.zeros(count) if at_stake is None else at_stake[numbers],
        )

    @classmethod
    def joined(cls, parts: Sequence[Nodes]) -> Nodes:
        begins = np.cumsum([0] + [len(part.depth) for part in parts])
        return cls(
            np.concatenate([part.rows for part in parts]),
            np.concatenate([p.groups + b for p, b in zip(parts, begins, strict=False)]),
            np.concatenate([part.used for part in parts]),
            np.concatenate([part.depth for part in parts]),
            np.concatenate([part.tentative for part in parts]),
            np.concatenate([part.at_stake for part in parts]),
        )


def lone_children(
    column: Column,
    number: int,
    rows: npt.NDArray[np.integer],
    groups: npt.NDArray[np.integer],
    num_groups: int,
    children: Children,
    used: Bool,
    depth: int | Int64,
) -> list[Nodes]:
    """Rows that are alone with their value of a column: those of one group may try another.

    Args:
        used, depth: as for `Nodes.of`, with the column among those used.

    Returns:
        one element, or none if no group has two such rows.
    """
    alone = children.counts == 1
    lone_per_group = np.bincount(children.parents[alone], minlength=num_groups)
    chosen = alone[children.of_rows] & (lone_per_group[groups] > 1)
    if not chosen.any():
        return []
    with_them = neighbor_tokens(column, children.parents, children.codes, num_groups)
    without = neighbor_tokens(column, children.parents[~alone], children.codes[~alone], num_groups)
    return [Nodes.of(rows[chosen], groups[chosen], used, depth, number, with_them - without)]


def refine(columns: Sequence[Column], positions: FieldPositions, nodes: list[Nodes]) -> None:
    """Places the field that saves most now, group by group, as long as one saves tokens.

    Args:
        positions: changed in place.
        nodes: groups whose next field may be placed.
    """
    while nodes:
        here = Nodes.joined(nodes)
        best = _best_columns(columns, here)
        placed = best >= 0
        moved = (placed & (here.tentative >= 0))[here.groups]
        positions.remove(here.rows[moved], here.tentative[here.groups[moved]])
        nodes = []
        for number in np.unique(best[placed]).tolist():
            nodes += _place(columns[number], number, here, best == number, positions)


def _best_columns(columns: Sequence[Column], here: Nodes) -> Int64:
    """The column that saves most for each group, int64 [groups]; -1: nothing is gained."""
    num_groups = len(here.depth)
    saved, best = here.at_stake.copy(), np.full(num_groups, -1)
    for number, column in enumerate(columns):
        free = ~here.used[here.groups, number]
        if not free.any():
            continue
        codes = column.codes[here.rows[free]]
        children = split(here.groups[free], num_groups, codes, column.num_values)
        gains = saved_tokens(column, column.lengths, children, num_groups)
        better = gains > saved
        saved[better], best[better] = gains[better], number
    return best


def _place(
    column: Column, number: int, here: Nodes, chosen: Bool, positions: FieldPositions
) -> list[Nodes]:
    inside = chosen[here.groups]
    rows, groups, num_groups = here.rows[inside], here.groups[inside], len(here.depth)
    positions.place(rows, number, here.depth[groups])
    children = split(groups, num_groups, column.codes[rows], column.num_values, True)
    used = here.used.copy()
    used[:, number] = True
    left = lone_children(column, number, rows, groups, num_groups, children, used, here.depth)
    together = children.counts[children.of_rows] > 1
    if together.any():
        of_children, parents = children.of_rows[together], children.parents
        left.append(Nodes.of(rows[together], of_children, used[parents], here.depth[parents] + 1))
    return left
