# SPDX-License-Identifier: Apache-2.0
"""Columns of a table as integers, with the tokens that their values become in a prompt."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from vllm_relay.tables.ordering.sequences import TokenSequences

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


Render = Callable[[str, str], str]
"""From the name of a field and the text of its value to its part of a prompt."""

Tokenize = Callable[[Sequence[str]], Iterable[Sequence[int]]]
"""From parts of prompts to the tokens of each."""


class FieldTexts(Sequence[str]):
    """A text of each distinct value, made when it is read.

    Args:
        order: which of them, int64 [distinct values].
        render: from one of them to the text that is read; None for the same.
    """

    def __init__(
        self,
        texts: Any,
        order: npt.NDArray[np.int64],
        render: Callable[[Any], str] | None = None,
    ) -> None:
        self._texts, self._order, self._render = texts, order, render

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, code: int) -> str: ...
    @overload
    def __getitem__(self, code: slice) -> list[str]: ...
    def __getitem__(self, code: int | slice) -> str | list[str]:
        if isinstance(code, slice):
            return [self[each] for each in range(*code.indices(len(self)))]
        text = self._texts[self._order[code]]
        return text if self._render is None else self._render(text)


@dataclass(frozen=True)
class Column:
    """One field of all rows.

    A value is what the model would see: values with the same text are the same value.

    Attributes:
        name: of the field.
        texts: the distinct values, [distinct values]; they may be made when they are read.
        codes: int32 [rows], indices into `texts`.
        tokens: of each distinct value's rendered field, in lexicographic order.
    """

    name: str
    texts: Sequence[str]
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
    codes = np.fromiter(
        (numbers.setdefault(cell_text(value, null_text), len(numbers)) for value in values),
        np.int32,
    )
    return column_of(name, list(numbers), codes, render, tokenize)


def column_of(
    name: str,
    texts: Sequence[str],
    codes: npt.NDArray[np.int32],
    render: Render = render_field,
    tokenize: Tokenize | None = None,
) -> Column:
    """
    Args:
        texts: of the distinct values, all different; the column reads them where they are.
        codes: int32 [rows], indices into `texts`.
        name, render, tokenize: as for `encode_column`.
    """
    rendered = FieldTexts(texts, np.arange(len(texts)), partial(render, name))
    if tokenize is None:
        tokens = TokenSequences.from_texts(rendered[:])
    else:
        tokens = TokenSequences.from_lists(tokenize(rendered))
    order = tokens.sorted_indices()
    ranks = np.empty(len(texts), np.int32)
    ranks[order] = np.arange(len(texts), dtype=np.int32)
    return Column(name, FieldTexts(texts, order), ranks[codes], tokens.take(order))


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
