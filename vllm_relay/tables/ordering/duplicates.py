# SPDX-License-Identifier: Apache-2.0
"""Rows that become the same prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from vllm_relay.tables.ordering.columns import Column, num_rows
from vllm_relay.tables.ordering.groups import split

Rule = Callable[[str], str]
"""From a text to the text that stands for all that are held to be equal."""

RULES: Mapping[str, Rule] = {
    "strip": str.strip,
    "collapse_spaces": lambda text: " ".join(text.split()),
    "casefold": str.casefold,
}


@dataclass(frozen=True)
class DistinctRows:
    """
    Attributes:
        first_rows: the first row of each kind, ascending, int64 [kinds].
        number_of_row: the kind of each row, an index into `first_rows`, int64 [rows].
        num_equal: rows that are left out because an earlier one has the same texts.
        num_by_rules: rows that are left out only because rules make their texts equal.
    """

    first_rows: npt.NDArray[np.int64]
    number_of_row: npt.NDArray[np.int64]
    num_equal: int
    num_by_rules: int


def distinct_rows(columns: Sequence[Column], rules: Sequence[str] = ()) -> DistinctRows:
    """
    Args:
        columns: those that the prompt uses.
        rules: names of `RULES` that are applied to the texts, in this order. They may change
            answers: without them rows are equal only if their prompts are.

    Raises:
        ValueError: there is no column, columns have different numbers of rows, or a rule is not
            known.
    """
    unknown = [rule for rule in rules if rule not in RULES]
    if unknown:
        raise ValueError(f"rules {unknown} given, expected some of {list(RULES)}")
    exact = _distinct(columns)
    if not rules:
        return exact
    merged = _distinct([_apply(column, rules) for column in columns])
    by_rules = len(exact.first_rows) - len(merged.first_rows)
    return replace(merged, num_equal=exact.num_equal, num_by_rules=by_rules)


def _apply(column: Column, rules: Sequence[str]) -> Column:
    numbers: dict[str, int] = {}
    kinds = np.empty(column.num_values, np.int32)
    for code, text in enumerate(column.texts):
        for rule in rules:
            text = RULES[rule](text)
        kinds[code] = numbers.setdefault(text, len(numbers))
    return replace(column, texts=list(numbers), codes=kinds[column.codes])


def _distinct(columns: Sequence[Column]) -> DistinctRows:
    rows = num_rows(columns)
    groups, num_groups = np.zeros(rows, np.int64), 1
    for column in columns:
        if rows == 0 or num_groups == rows:
            break
        children = split(groups, num_groups, column.codes, column.num_values, with_rows=True)
        groups, num_groups = children.of_rows, len(children.counts)
    if rows == 0:
        num_groups = 0
    some_first = np.empty(num_groups, np.int64)
    some_first[groups[::-1]] = np.arange(rows)[::-1]
    # kinds in the order of their first rows
    order = np.argsort(some_first)
    ranks = np.empty(num_groups, np.int64)
    ranks[order] = np.arange(num_groups)
    return DistinctRows(some_first[order], ranks[groups], rows - num_groups, 0)
