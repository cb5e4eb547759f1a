# SPDX-License-Identifier: Apache-2.0
"""Columns of texts in Arrow, read where they are."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_ROWS_PER_PART = 1024
_KEY_CHARS = 64


def distinct_values(
    column: pa.ChunkedArray,
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """
    Args:
        column: of texts, without NULL.

    Returns:
        numbers of the rows' values, from 0 on as they first come, int32 [rows]; and the first row
        of each value, int64 [distinct values].
    """
    numbers: dict[str | bytes, int] = {}
    codes = np.empty(len(column), np.int32)
    # Arrow would hold all values once more, and a larger copy while it grows
    for begin in range(0, len(column), _ROWS_PER_PART):
        part = column.slice(begin, _ROWS_PER_PART).combine_chunks().dictionary_encode()
        texts = part.dictionary.to_pylist()
        found = [numbers.setdefault(_key(text), len(numbers)) for text in texts]
        codes[begin : begin + len(part)] = np.array(found, np.int32)[part.indices.to_numpy()]
    first_rows = np.empty(len(numbers), np.int64)
    first_rows[codes[::-1]] = np.arange(len(codes))[::-1]
    return codes, first_rows


def _key(text: str) -> str | bytes:
    """What stands for a text: of a long one 128 bits."""
    if len(text) <= _KEY_CHARS:
        return text
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def is_text(type: pa.DataType) -> bool:
    types = pa.types
    return types.is_string(type) or types.is_large_string(type) or types.is_string_view(type)


def is_bytes(type: pa.DataType) -> bool:
    types = pa.types
    return (
        types.is_binary(type)
        or types.is_large_binary(type)
        or types.is_fixed_size_binary(type)
        or types.is_binary_view(type)
    )
