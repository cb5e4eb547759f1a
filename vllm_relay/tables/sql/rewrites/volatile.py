# SPDX-License-Identifier: Apache-2.0
"""What differs each time is evaluated once, so that every pass sees the same."""

from __future__ import annotations

from sqlglot.tokens import TokenType

from vllm_relay.tables.sql.database import TemporaryTables, is_valid
from vllm_relay.tables.sql.expressions import SqlError, fold
from vllm_relay.tables.sql.text.edited import Edited
from vllm_relay.tables.sql.text.sources import sources
from vllm_relay.tables.sql.text.structure import Query, Range, Select, select_items

_RANK, _CLAUSE_RANK = 7, 2


def settle(tables: TemporaryTables, edited: Edited) -> None:
    """Make tables of what differs each time.

    Raises:
        SqlError: that cannot be done.
    """
    found = _volatile(edited)
    if not found and not any(_is_sampled(edited, query) for query in edited.structure.all_queries):
        return
    settled: list[Query] = []
    for query in sorted(edited.structure.all_queries, key=lambda query: query.range[0]):
        if any(_is_inside(query.range, other.range) for other in settled):
            continue
        own = [tokens for tokens in found if _is_inside(tokens, query.range)]
        if not (own or _is_sampled(edited, query)) or query.is_recursive:
            continue
        if any(_is_inside(call.range, query.range) for call in edited.calls):
            continue
        if _settle_query(tables, edited, query):
            settled.append(query)
    left = [tokens for tokens in found if not any(_is_inside(tokens, q.range) for q in settled)]
    for query in edited.structure.all_queries:
        for select in query.selects:
            own = [tokens for tokens in left if edited.structure.innermost(tokens[0])[0] is select]
            if own or "sample" in select.clauses or _samples_source(edited, select):
                _settle_select(tables, edited, select, own)


def refuse(edited: Edited) -> None:
    """For a statement that changes rows, of which no part can be made a table before.

    Raises:
        SqlError: something in it differs each time.
    """
    for tokens in _volatile(edited):
        raise SqlError(
            f"{edited.structure.text_of(tokens)} differs each time it is evaluated, beside llm() "
            f"in a statement that changes rows: make a table of it first"
        )


def _is_inside(tokens: Range, outer: Range) -> bool:
    return outer[0] <= tokens[0] and tokens[1] <= outer[1]


def _volatile(edited: Edited) -> list[Range]:
    structure = edited.structure
    asking = {call.range[0] for call in edited.calls}
    called = [
        number
        for number in range(len(structure.tokens))
        if structure.is_type(number + 1, TokenType.L_PAREN)
        and number + 1 in structure.match
        and number not in asking
    ]
    return [
        (number, structure.match[number + 1] + 1)
        for number in called
        if fold(structure.tokens[number].text) in edited.function_names.volatile
    ]


def _is_sampled(edited: Edited, query: Query) -> bool:
    return any(
        "sample" in select.clauses or _samples_source(edited, select) for select in query.selects
    )


def _samples_source(edited: Edited, select: Select) -> bool:
    tokens = edited.structure.flat(select.clauses.get("from", (0, 0)))
    return any(edited.structure.is_type(number, TokenType.TABLE_SAMPLE) for number in tokens)


def _settle_query(tables: TemporaryTables, edited: Edited, query: Query) -> bool:
    text = edited.context(query, edited.text(query.range))
    if not is_valid(edited.connection, text):
        return False
    edited.replace_query(query, f"FROM {tables.create(text)}")
    return True


def _settle_select(
    tables: TemporaryTables, edited: Edited, select: Select, volatile: list[Range]
) -> None:
    structure = edited.structure
    found = sources(structure, select)
    if len(found) != 1:
        if all(_is_harmless(edited, tokens) for tokens in volatile) and volatile:
            return
        what = structure.text_of(volatile[0]) if volatile else "a sample"
        raise SqlError(
            f"{what} differs each time it is evaluated, beside llm() over several tables: give it "
            f"a column of its own in a subquery of FROM"
        )
    source = found[0]
    items = [f"{structure.text_of(tokens)} AS relay_v{i}" for i, tokens in enumerate(volatile)]
    where = select.clauses.get("where")
    is_free = where is not None and not any(_is_inside(c.range, where) for c in edited.calls)
    kept = is_free and where is not None and not any(_is_inside(t, where) for t in volatile)
    text = f"SELECT {', '.join(['*', *items])} FROM {edited.text(select.clauses['from'])}"
    if kept and where is not None:
        text += f" WHERE {edited.text(where)}"
    if "sample" in select.clauses:
        if kept:
            text = text.split(" WHERE ")[0]
        text += f" USING SAMPLE {edited.text(select.clauses['sample'])}"
        edited.replace_clause(select, "sample", "")
    table = tables.create(edited.context(select.query, text))
    alias = source.alias or "relay_source"
    edited.replace_clause(select, "from", f"FROM (FROM {table}) AS {alias} ")
    for index, tokens in enumerate(volatile):
        edited.replace(tokens, _RANK, f"relay_v{index}")
    if volatile and "select" in select.clauses:
        hidden = ", ".join(f"relay_v{index}" for index in range(len(volatile)))
        for tokens in select_items(structure, select):
            last = tokens[1] - 1
            if structure.is_type(last, TokenType.STAR) and (
                last == tokens[0] or structure.is_type(last - 1, TokenType.DOT)
            ):
                edited.replace((last, last + 1), _RANK, f"* EXCLUDE ({hidden})")


def _is_harmless(edited: Edited, tokens: Range) -> bool:
    """Whether it is an item of the select list that decides about nothing."""
    name = edited.structure.tokens[tokens[0]].text.lower()
    is_listed = edited.structure.innermost(tokens[0])[1] == "select"
    in_call = any(_is_inside(tokens, call.range) for call in edited.calls)
    return is_listed and not in_call and name != "nextval"
