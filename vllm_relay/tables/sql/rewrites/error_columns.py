# SPDX-License-Identifier: Apache-2.0
"""Columns of errors beside those of answers."""

from __future__ import annotations

from sqlglot.tokens import TokenType

from vllm_relay.tables.sql.text.edited import Edited
from vllm_relay.tables.sql.text.structure import select_items
from vllm_relay.tables.texts import quoted

_RANK = 4


def add_error_columns(edited: Edited) -> None:
    """One for each call alone in the list of the outermost SELECT.

    Those whose rows are not single rows stay as they are.
    """
    structure = edited.structure
    query = structure.queries[-1] if structure.queries else None
    if query is None or query.is_set or len(query.selects) != 1:
        return
    select = query.selects[0]
    clauses = select.clauses
    if "select" not in clauses or "group" in clauses or "having" in clauses:
        return
    if structure.is_type(clauses["select"][0], TokenType.DISTINCT):
        return
    added: list[str] = []
    for item in select_items(structure, select):
        call = next((call for call in edited.calls if call.range[0] == item[0]), None)
        if call is None or call.key is not None:
            continue
        rest = (call.range[1], item[1])
        if rest[0] == rest[1]:
            name = call.site.function
        elif rest[1] - rest[0] <= 2:
            name = structure.tokens[rest[1] - 1].text
        else:
            continue
        key = edited.key(call)
        value = edited.functions.error(call.site.number, key)
        added.append(f", {value} AS {quoted(name + '_error')}")
    if added:
        end = structure.span(clauses["select"])[1]
        edited.splices.add(end, end, _RANK, lambda splice: "".join(added))
