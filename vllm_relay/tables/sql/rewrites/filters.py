# SPDX-License-Identifier: Apache-2.0
"""Conditions that decide which rows are asked about.

Groups that an IN (SELECT ...) above leaves out are not asked about: DuckDB moves plain conditions
on keys below the grouping, but not those with a subquery. Rows of a group are equal for IN if they
are for GROUP BY, so the condition holds for all of them or for none.

Calls that join conditions decide about are kept above the joins: DuckDB moves a filter below a join
if it is about one side only, so a call gets a column of every side as an argument that nobody
reads.
"""

from __future__ import annotations

import duckdb
from sqlglot.tokens import TokenType

from vllm_relay.tables.sql.database import is_valid
from vllm_relay.tables.sql.expressions import fold
from vllm_relay.tables.sql.text.conditions import conjuncts, read_condition
from vllm_relay.tables.sql.text.edited import Edited
from vllm_relay.tables.sql.text.sources import Source, sources
from vllm_relay.tables.sql.text.structure import Query, Range, Select, select_items
from vllm_relay.tables.texts import quoted

_NOT_THROUGH = ("limit", "offset", "qualify", "window", "sample")


def filter_groups(edited: Edited) -> None:
    for query in edited.structure.all_queries:
        select = query.above
        if select is None or query.clause != "from" or not edited.calls_in(query.range):
            continue
        found = sources(edited.structure, select)
        inner = any(source.join not in ("", ",", "JOIN", "INNER JOIN") for source in found)
        own = [s for s in found if s.is_query and s.range[0] <= query.range[0] < s.range[1]]
        if inner or not own or "where" not in select.clauses or query.is_set or query.ctes:
            continue
        where = read_condition(edited.structure, select.clauses["where"], lambda _: True)
        added = [
            text
            for part in conjuncts(where)
            if (text := _on_key(edited, select, query, own[0], part.range))
        ]
        if added:
            edited.add_filter(query.selects[0], added)


def _on_key(
    edited: Edited,
    select: Select,
    query: Query,
    source: Source,
    tokens: Range,
) -> str | None:
    """The condition for the SELECT that groups; None if it is none on a key."""
    structure = edited.structure
    begin, end = tokens
    if structure.is_type(begin + 1, TokenType.DOT):
        if fold(structure.tokens[begin].text) != fold(source.alias.strip('"')):
            return None
        begin += 2
    opening = end - 1
    while opening > begin and structure.match.get(opening) != end - 1:
        opening -= 1
    between = [structure.word(number) for number in range(begin + 1, opening)]
    if between not in (["IN"], ["NOT", "IN"]) or not structure.starts_query(opening):
        return None
    groups = query.selects[0]
    if "group" not in groups.clauses or any(part in groups.clauses for part in _NOT_THROUGH):
        return None
    name = fold(structure.tokens[begin].text)
    keys = [
        fold(structure.text_of(part).strip('"'))
        for part in structure.split(groups.clauses["group"])
    ]
    items = [structure.text_of(item) for item in select_items(structure, groups)]
    names = [fold(item.strip('"')) for item in items]
    is_all = keys == ["all"]
    is_key = name in keys or is_all or (name in names and str(names.index(name) + 1) in keys)
    if names.count(name) != 1 or not is_key:
        return None
    test = (opening + 1, end - 1)
    if edited.calls_in(test) or not is_valid(
        edited.connection, edited.context(select.query, edited.text(test))
    ):
        return None
    return edited.text((begin, end))


def add_anchors(edited: Edited) -> None:
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
            texts[key] = _anchors(edited, call.select)
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


def _anchors(edited: Edited, select: Select) -> str:
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
                names = edited.connection.sql(text).columns
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
