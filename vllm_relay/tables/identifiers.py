# SPDX-License-Identifier: Apache-2.0
"""Names and texts in SQL."""

from __future__ import annotations

ANSWER, ERROR = "relay_answer", "relay_error"
"""Columns of what a job makes, beside its fields."""
IS_CUT = "relay_is_cut"
"""Another one, for those who ask for it."""


def quoted(name: str) -> str:
    """A name as DuckDB reads it whatever it holds."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """A text as DuckDB reads it whatever it holds."""
    return "'" + text.replace("'", "''") + "'"
