# SPDX-License-Identifier: Apache-2.0
"""Names and texts in SQL."""

from __future__ import annotations


def quoted(name: str) -> str:
    """A name as DuckDB reads it whatever it holds."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """A text as DuckDB reads it whatever it holds."""
    return "'" + text.replace("'", "''") + "'"


def json_text(column: str, type: object) -> str:
    """SQL of the JSON of a column's values, a VARCHAR.

    Args:
        type: of DuckDB.
    """
    # numbers of single precision as they are written, not as what they are in double precision
    value = f"{column}::VARCHAR::DOUBLE" if str(type) == "FLOAT" else column
    return f"to_json({value})::VARCHAR"
