# SPDX-License-Identifier: Apache-2.0
"""An order of fields for each row.

The tokens that an unlimited prefix cache saves are those of all prompts less those of the tree of
their beginnings, so the order of fields is chosen for a small tree. First all rows that share a
beginning go on with the same field (`field_sets`). Then, wherever rows stay alone with their value,
those of the same beginning try another field together (`refinement`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_relay.tables.ordering.columns import Column, num_rows
from vllm_relay.tables.ordering.duplicates import distinct_rows, find_dependencies
from vllm_relay.tables.ordering.per_row.field_sets import FieldSet, FieldSets
from vllm_relay.tables.ordering.per_row.groups import split
from vllm_relay.tables.ordering.per_row.refinement import (
    FieldPositions,
    Nodes,
    lone_children,
    refine,
)
from vllm_relay.tables.ordering.table_order import (
    TableOrder,
    compose,
    fixed_order,
    ranked_fields,
    sort_rows,
)

MAX_WIDTH = 16
_SPLIT_ROWS = 5_000
"""What a split of groups by a column costs beside its rows, in rows."""
_BASE_WORK_ROWS, _WORK_ROWS_PER_ROW = 100_000_000, 200
"""Rows that may be split, summed over sets and columns. A core splits 10 to 25 million a second."""
_MAX_COMPARED_TOKENS = 1 << 24


def per_row_order(columns: Sequence[Column], width: int | None = None) -> TableOrder:
    """
    Args:
        columns: functional dependencies between them are found.
        width: sets of fields of each size that are followed, at least 1; None chooses it by the
            size of the table, at most 16.

    Returns:
        An order that saves at least as many tokens with an unlimited cache as `fixed_order`. They
        are counted in the prompts up to 16 million tokens, and field by field beyond.

    Raises:
        ValueError: there is no column, columns have different numbers of rows, or the width is
            below 1.
    """
    rows = num_rows(columns)
    if width is not None and width < 1:
        raise ValueError(f"a width of {width} given, expected at least 1; None chooses it")
    distinct = distinct_rows([column.codes for column in columns])
    chosen = [column.take(distinct.first_rows) for column in columns]
    if width is None:
        width = _affordable_width(len(distinct.first_rows), len(columns))
    fields = _choose_fields(chosen, ranked_fields(columns), width)
    order = sort_rows(columns, fields[distinct.number_of_row])
    if rows == 0 or _total_tokens(columns) > _MAX_COMPARED_TOKENS:
        return order
    fixed = fixed_order(columns)
    if compose(columns, fixed).total_shared() > compose(columns, order).total_shared():
        return fixed
    return order


def _affordable_width(num_rows: int, num_columns: int) -> int:
    splits = num_columns * (num_columns + 1) / 2
    affordable = _BASE_WORK_ROWS + _WORK_ROWS_PER_ROW * num_rows
    return max(1, min(MAX_WIDTH, int(affordable / (splits * (num_rows + _SPLIT_ROWS)))))


def _total_tokens(columns: Sequence[Column]) -> int:
    return sum(int(column.lengths[column.codes].sum()) for column in columns)


def _choose_fields(
    columns: Sequence[Column], ranked: npt.NDArray[np.int16], width: int
) -> npt.NDArray[np.int16]:
    """
    Args:
        columns: of distinct rows.
        ranked: an order of fields for all rows that must not save more.

    Returns:
        The columns of each row in their order, int16 [rows, columns].
    """
    rows = len(columns[0].codes)
    positions = FieldPositions(rows, ranked)
    if rows > 1 and len(columns) > 1:
        sets = FieldSets(columns, find_dependencies(columns), ranked.tolist(), width)
        refine(columns, positions, _place_by_sets(sets, positions))
    return positions.fields()


def _place_by_sets(sets: FieldSets, positions: FieldPositions) -> list[Nodes]:
    """Places the fields that the sets choose; returns the groups that can still be improved."""
    left: list[Nodes] = []
    arriving: dict[int, list[npt.NDArray[np.int32]]] = {0: [sets.sets[0].rows]}
    for one in sorted(sets.sets.values(), key=lambda each: each.fields.bit_count()):
        if one.fields not in arriving:
            continue
        rows = np.concatenate(arriving.pop(one.fields))
        chosen = one.next_field[one.group_of_row[rows]]
        for number in np.unique(chosen[chosen >= 0]).tolist():
            left += _place_one(sets, one, number, rows[chosen == number], positions, arriving)
    return left


def _place_one(
    sets: FieldSets,
    one: FieldSet,
    number: int,
    rows: npt.NDArray[np.int32],
    positions: FieldPositions,
    arriving: dict[int, list[npt.NDArray[np.int32]]],
) -> list[Nodes]:
    columns, column = sets.columns, sets.columns[number]
    depth = one.fields.bit_count()
    groups, num_groups = one.group_of_row[rows], one.num_groups
    children = split(groups, num_groups, column.codes[rows], column.num_values, True)
    positions.place(rows, number, depth)
    used = np.array([bool(one.fields >> other & 1) for other in range(len(columns))])
    used[number] = True
    left = lone_children(column, number, rows, groups, num_groups, children, used, depth)

    together = children.counts[children.of_rows] > 1
    staying = rows[together]
    for place, other in enumerate(sets.dependents(one.fields, number), start=depth + 1):
        positions.place(staying, other, place)
        used[other] = True
    fields = sets.with_field(one.fields, number)
    if fields in sets.sets:
        arriving.setdefault(fields, []).append(staying)
    elif len(staying):
        left.append(Nodes.of(staying, children.of_rows[together], used, int(used.sum())))
    return left
