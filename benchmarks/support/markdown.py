# SPDX-License-Identifier: Apache-2.0
"""Tables in Markdown."""

from typing import Any

from benchmarks.support.common import show

Json = dict[str, Any]


def markdown_table(rows: list[Json]) -> str:
    if not rows:
        return "None.\n"
    columns = list(rows[0])
    numeric = {c: all(isinstance(row[c], int | float | None) for row in rows) for c in columns}
    rule = ["---:" if numeric[column] else "---" for column in columns]
    lines = [columns, rule, *([_cell(row.get(column)) for column in columns] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _cell(value: Any) -> str:
    return show(value).replace("|", "\\|")
