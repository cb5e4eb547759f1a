# SPDX-License-Identifier: Apache-2.0
"""Values of fields as references to images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa

from vllm_relay.tables.images.fields import ImageKind
from vllm_relay.tables.images.store import ImageStore

DUCKDB_TYPES: dict[ImageKind, str] = {"bytes": "BLOB", "path": "VARCHAR", "url": "VARCHAR"}
"""Of the values of each kind."""


def referred(name: str, column: pa.ChunkedArray, kind: ImageKind, store: ImageStore) -> Any:
    """References to the images of a column, strings [rows].

    Args:
        name: of the column, for messages.

    Raises:
        ValueError: its values are of another kind.
    """
    expected = pa.large_binary() if kind == "bytes" else pa.large_string()
    is_binary = kind == "bytes"
    types = pa.types
    fits = types.is_null(column.type) or any(
        is_type(column.type)
        for is_type in (
            (
                types.is_binary,
                types.is_large_binary,
                types.is_fixed_size_binary,
                types.is_binary_view,
            )
            if is_binary
            else (types.is_string, types.is_large_string, types.is_string_view)
        )
    )
    if not fits:
        raise ValueError(
            f"column {name!r} of type {column.type} given as images of kind {kind!r}, expected "
            f"{'bytes' if is_binary else 'texts'}"
        )
    return pa.chunked_array(
        [
            pa.array([_reference(each.as_py(), kind, store) for each in chunk], pa.string())
            for chunk in column.cast(expected).chunks
        ],
        pa.string(),
    )


def referring(kind: ImageKind, store: ImageStore) -> Callable[[Any], pa.Array]:
    """A function from an Arrow column of values to one of references."""

    def function(values: Any) -> pa.Array:
        return pa.array(
            [_reference(value, kind, store) for value in values.to_pylist()], pa.string()
        )

    return function


def _reference(value: Any, kind: ImageKind, store: ImageStore) -> str | None:
    return None if value is None else store.reference(kind, value)
