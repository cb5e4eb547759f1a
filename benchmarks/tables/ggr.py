# SPDX-License-Identifier: Apache-2.0
"""Greedy group recursion (GGR), the published way to give each row its own order of fields.

Liu et al., "Optimizing LLM Queries in Relational Data Analytics Workloads", MLSys 2025, Algorithm
1: the value with the highest length^2 x (rows - 1) splits the table into the rows that have it,
where its field comes first, and the others; both are ordered in the same way. With the limits of
the authors' public evaluator. Fields keep their names here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_relay.tables.ordering import Column, TableOrder

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Limits:
    max_row_depth: int = 4
    max_column_depth: int = 2
    min_score: float = 1e5
    """A value below it does not split."""
    max_distinct: float = 0.7
    """Fields with more distinct values, by rows, come last."""
    chunk_rows: int = 2000
    """The table is halved until its parts are not larger."""


class _Field:
    """Columns that determine each other are one."""

    def __init__(self, columns: Sequence[Column], numbers: Sequence[int]) -> None:
        self.numbers = list(numbers)
        cells = np.stack([columns[number].codes for number in numbers], axis=1)
        distinct, codes = np.unique(cells, axis=0, return_inverse=True)
        self.codes = codes.ravel()
        self.lengths = sum(
            columns[number].lengths[distinct[:, place]] for place, number in enumerate(numbers)
        )

    def score(self, rows: Rows) -> float:
        """Mean length^2 x (mean rows of a value - 1)."""
        codes = self.codes[rows]
        per_value = len(rows) / max(len(np.unique(codes)), 1)
        return float(self.lengths[codes].mean()) ** 2 * (per_value - 1)


def greedy_group_recursion(
    columns: Sequence[Column],
    equivalent: Sequence[Sequence[int]] = (),
    limits: Limits | None = None,
) -> TableOrder:
    """
    Args:
        equivalent: the functional dependencies that are given: columns that determine each other.
    """
    limits = limits or Limits()
    merged = {number: group for group in equivalent for number in group}
    groups = {tuple(merged.get(number, [number])) for number in range(len(columns))}
    fields = [_Field(columns, group) for group in sorted(groups)]
    rows = np.arange(len(columns[0].codes))
    last = [f for f in fields if len(np.unique(f.codes)) > limits.max_distinct * len(rows)]
    first = _ranked([field for field in fields if field not in last], rows)
    recursion = _Recursion(len(rows), limits, _ranked(last, rows))
    for chunk in _chunks(_sorted_rows(first, rows), limits.chunk_rows):
        recursion.order(chunk, first, [], 0, 0)
    order = np.concatenate(recursion.done)
    return TableOrder(order, np.array([recursion.fields[row] for row in order], np.int16))


class _Recursion:
    def __init__(self, num_rows: int, limits: Limits, last: list[_Field]) -> None:
        self.done: list[Rows] = []
        self.fields: list[list[int]] = [[] for _ in range(num_rows)]
        self._limits = limits
        self._last = last

    def order(
        self, rows: Rows, fields: list[_Field], placed: list[_Field], depth: int, column_depth: int
    ) -> None:
        if len(rows) == 0:
            return
        limits = self._limits
        stopped = depth >= limits.max_row_depth or column_depth >= limits.max_column_depth
        best = None if stopped or not fields else _best_value(fields, rows)
        if best is None or best[0] < limits.min_score:
            ranked = _ranked(fields, rows)
            self._finish(_sorted_rows(ranked, rows), [*placed, *ranked])
            return
        _, field, code = best
        inside = field.codes[rows] == code
        others = [other for other in fields if other is not field]
        self.order(rows[inside], others, [*placed, field], depth, column_depth + 1)
        self.order(rows[~inside], fields, placed, depth + 1, column_depth)

    def _finish(self, rows: Rows, fields: list[_Field]) -> None:
        numbers = [number for field in [*fields, *self._last] for number in field.numbers]
        self.done.append(rows)
        for row in rows.tolist():
            self.fields[row] = numbers


def _best_value(fields: list[_Field], rows: Rows) -> tuple[float, _Field, int]:
    found = []
    for field in fields:
        codes, counts = np.unique(field.codes[rows], return_counts=True)
        scores = field.lengths[codes].astype(float) ** 2 * (counts - 1)
        best = int(np.argmax(scores))
        found.append((float(scores[best]), field, int(codes[best])))
    return max(found, key=lambda each: each[0])


def _ranked(fields: list[_Field], rows: Rows) -> list[_Field]:
    return sorted(fields, key=lambda field: -field.score(rows))


def _sorted_rows(fields: list[_Field], rows: Rows) -> Rows:
    if not fields:
        return rows
    return rows[np.lexsort([field.codes[rows] for field in reversed(fields)])]


def _chunks(rows: Rows, most: int) -> list[Rows]:
    if len(rows) <= most:
        return [rows]
    middle = len(rows) // 2
    return [*_chunks(rows[:middle], most), *_chunks(rows[middle:], most)]
