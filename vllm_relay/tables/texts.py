# SPDX-License-Identifier: Apache-2.0
"""Texts of any length in messages of one sentence; names and texts in SQL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_MESSAGE_CHARS = 400
_MAX_CELL_CHARS = 60


def shortened(text: str, max_chars: int = MAX_MESSAGE_CHARS) -> str:
    """A text of so many characters at most: its beginning and its end."""
    if len(text) <= max_chars:
        return text
    gap = " ... "
    num_last = max_chars // 3
    return text[: max_chars - num_last - len(gap)] + gap + text[-num_last:]


def row_text(fields: Mapping[str, Any]) -> str:
    """The cells of a row by name, each shortened."""
    return ", ".join(
        f"{name}={shortened(repr(value), _MAX_CELL_CHARS)}" for name, value in fields.items()
    )


def quoted(name: str) -> str:
    """A name as DuckDB reads it whatever it holds."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """A text as DuckDB reads it whatever it holds."""
    return "'" + text.replace("'", "''") + "'"


def json_text(column: str, type: object) -> str:
    """SQL of the JSON of a column's values, a VARCHAR."""
    # numbers of single precision as they are written, not as what they are in double precision
    value = f"{column}::VARCHAR::DOUBLE" if str(type) == "FLOAT" else column
    return f"to_json({value})::VARCHAR"
