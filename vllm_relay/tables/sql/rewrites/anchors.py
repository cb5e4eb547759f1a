# SPDX-License-Identifier: Apache-2.0
"""Calls that join conditions decide about are kept above the joins.

DuckDB moves a filter below a join if it is about one side only. A call gets a column of every
side as an argument that nobody reads.
"""

from __future__ import annotations

import duckdb

from vllm_relay.tables.identifiers import quoted
from vllm_relay.tables.sql.expressions import fold
from vllm_relay.tables.sql.text.edited import Edited
from vllm_relay.tables.sql.text.sources import sources
from vllm_relay.tables.sql.text.structure import Range, Select


def add_anchors(connection: duckdb.DuckDBPyConnection, edited: Edited) -> None:
    texts: dict[int, str] = {}
    for call in edited.calls:
        if call.select is None or call.clause not in ("where", "from"):
            continue
        tokens = call.select.clauses[call.clause]
        if call.clause == "from" and not _is_of_inner_on(edited, call.select, call.range):
            continue
        if not any(call is other for other in edited.calls_of(tokens)):
            continue
        key = id(call.select)
        if key not in texts:
            texts[key] = _anchors(connection, edited, call.select)
        if texts[key]:
            edited.anchors[call.range[0]] = texts[key]


def _is_of_inner_on(edited: Edited, select: Select, tokens: Range) -> bool:
    found = sources(edited.structure, select)
    if any(source.join not in ("", ",", "JOIN", "INNER JOIN", "CROSS JOIN") for source in found):
        return False
    return any(
        source.condition is not None and source.condition[0] <= tokens[0] < source.condition[1]
        for source in found
    )


def _anchors(connection: duckdb.DuckDBPyConnection, edited: Edited, select: Select) -> str:
    found = sources(edited.structure, select)
    if len(found) < 2:
        return ""
    from_text = edited.text(select.clauses["from"])
    compared = _compared(edited, select, [source.condition or source.using for source in found])
    columns: list[str] = []
    for source in found:
        if not source.alias:
            return ""
        for query in (f"{source.alias}.rowid", f"{source.alias}.*"):
            text = edited.context(select.query, f"SELECT {query} FROM {from_text}")
            try:
                names = connection.sql(text).columns
            except duckdb.Error:
                continue
            free = [name for name in names if fold(name) not in compared]
            if free:
                columns.append(f"hash({source.alias}.{quoted(free[0])})")
                break
    return f"[{', '.join(columns)}]"


def _compared(edited: Edited, select: Select, conditions: list[Range | None]) -> set[str]:
    """Names in the conditions: of two columns that are equal DuckDB may take either."""
    ranges = [tokens for tokens in (*conditions, select.clauses.get("where")) if tokens]
    tokens = edited.structure.tokens
    return {fold(token.text) for begin, end in ranges for token in tokens[begin:end]}
