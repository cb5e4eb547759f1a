# SPDX-License-Identifier: Apache-2.0
"""Columns of a table as integers, with the tokens that their values become in a prompt."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_relay.tables.ordering.range_minimum import RangeMinimum
from vllm_relay.tables.ordering.sequences import TokenSequences

Render = Callable[[str, str], str]
"""From the name of a field and the text of its value to its part of a prompt."""

Tokenize = Callable[[list[str]], Iterable[Sequence[int]]]
"""From parts of prompts to the tokens of each."""


@dataclass(frozen=True)
class Column:
    """One field of all rows.

    A value is what the model would see: values with the same text are the same value.

    Attributes:
        name: of the field.
        texts: the distinct values, [distinct values].
        codes: int32 [rows], indices into `texts`.
        tokens: of each distinct value's rendered field, in lexicographic order.
    """

    name: str
    texts: list[str]
    codes: npt.NDArray[np.int32]
    tokens: TokenSequences

    @property
    def num_values(self) -> int:
        return len(self.texts)

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each distinct value's field, int64 [distinct values]."""
        return self.tokens.lengths

    @cached_property
    def _neighbors(self) -> RangeMinimum:
        shared = self.tokens.shared_with_previous()
        return RangeMinimum(np.minimum(shared, np.iinfo(np.int16).max).astype(np.int16))

    def shared_lengths(
        self, lower: npt.NDArray[np.int64], upper: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.integer]:
        """Tokens that two values' fields begin with alike, counted up to 32,767.

        Args:
            lower, upper: codes, lower < upper, int64 [pairs].

        Returns:
            int16 [pairs].
        """
        # sorted sequences: what two share, all between them share
        return self._neighbors.query(lower + 1, upper)

    def take(self, rows: npt.NDArray[np.integer]) -> Column:
        """The column of some rows, with all its values."""
        return Column(self.name, self.texts, self.codes[rows], self.tokens)


def render_field(name: str, text: str) -> str:
    """A line ``name: value``."""
    return f"{name}: {text}\n"


def render_value(name: str, text: str) -> str:
    """The value alone, as the papers count."""
    return text


def cell_text(value: Any, null_text: str = "") -> str:
    """The text of a cell; None and NaN have `null_text`."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return null_text
    return value if type(value) is str else str(value)


def encode_column(
    name: str,
    values: Iterable[Any],
    render: Render = render_field,
    tokenize: Tokenize | None = None,
    null_text: str = "",
) -> Column:
    """
    Args:
        name: of the field.
        values: a cell per row, of any type with a text.
        render: what becomes of a field in the prompt.
        tokenize: the tokens of rendered fields; None counts characters.
        null_text: stands for None and NaN.
    """
    numbers: dict[str, int] = {}
    first_codes = np.fromiter(
        (numbers.setdefault(cell_text(value, null_text), len(numbers)) for value in values),
        np.int32,
    )
    texts = list(numbers)
    rendered = [render(name, text) for text in texts]
    if tokenize is None:
        tokens = TokenSequences.from_texts(rendered)
        order = np.array(sorted(range(len(texts)), key=rendered.__getitem__), np.int64)
    else:
        tokens = TokenSequences.from_lists(tokenize(rendered))
        order = tokens.sorted_indices()
    ranks = np.empty(len(texts), np.int32)
    ranks[order] = np.arange(len(texts), dtype=np.int32)
    return Column(
        name, [texts[index] for index in order.tolist()], ranks[first_codes], tokens.take(order)
    )


def encode_columns(
    table: Mapping[str, Iterable[Any]],
    render: Render = render_field,
    tokenize: Tokenize | None = None,
    null_text: str = "",
) -> list[Column]:
    """
    Args:
        table: cells by field, in the order of the fields.
        render, tokenize, null_text: as for `encode_column`.

    Raises:
        ValueError: fields have different numbers of rows.
    """
    columns = [
        encode_column(name, values, render, tokenize, null_text) for name, values in table.items()
    ]
    num_rows(columns)
    return columns


def num_rows(columns: Sequence[Column]) -> int:
    """
    Raises:
        ValueError: there is no column, or columns have different numbers of rows.
    """
    if not columns:
        raise ValueError("a table without fields was given, expected at least one field")
    rows = {column.name: len(column.codes) for column in columns}
    if len(set(rows.values())) > 1:
        raise ValueError(
            f"fields with different numbers of rows were given: {rows}; give a cell for every row, "
            f"None where there is no value"
        )
    return len(columns[0].codes)
