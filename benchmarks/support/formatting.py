# SPDX-License-Identifier: Apache-2.0
"""Tables as text and in Markdown."""

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]
"""Of a table: cells by column."""


def show(value: Any) -> str:
    """A table cell."""
    if value is None:
        return "-"
    if isinstance(value, float):
        if value != value:
            return "nan"
        if value == 0 or 1e-3 <= abs(value) < 1e5:
            digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 20 else 2
            return f"{value:.{digits if abs(value) >= 0.1 else 4}f}"
        return f"{value:.2e}"
    return str(value)


def format_rows(rows: Sequence[Row]) -> str:
    """Aligned text, one line per row."""
    if not rows:
        return "(none)"
    columns = list(rows[0])
    cells = [columns] + [[show(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in cells
    )


def markdown_table(rows: list[Row]) -> str:
    if not rows:
        return "None.\n"
    columns = list(rows[0])
    numeric = {c: all(isinstance(row[c], int | float | None) for row in rows) for c in columns}
    rule = ["---:" if numeric[column] else "---" for column in columns]
    lines = [columns, rule, *([_cell(row.get(column)) for column in columns] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _cell(value: Any) -> str:
    return show(value).replace("|", "\\|")
