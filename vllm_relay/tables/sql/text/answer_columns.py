# SPDX-License-Identifier: Apache-2.0
"""Columns that hold answers, by their names, and what reads them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from sqlglot.tokens import TokenType

from vllm_relay.tables.sql.expressions import FUNCTIONS, fold
from vllm_relay.tables.sql.text.call_sites import Call
from vllm_relay.tables.sql.text.edited import Edited
from vllm_relay.tables.sql.text.structure import Range, select_items


def with_ctes(edited: Edited, tokens: Range) -> list[Range]:
    """Some tokens, and the queries of WITH that they name, and those that these name."""
    found = [tokens]
    names = _names(edited, tokens)
    ctes = [(cte.range, name) for query in edited.structure.all_queries for name, cte in query.ctes]
    for before, name in sorted(ctes, reverse=True):
        if before[1] <= tokens[0] and fold(name) in names:
            found.append(before)
            names |= _names(edited, before)
    return found


class AnswerColumns:
    """Those of answers and of values made of them; a name too many costs an estimate rows only.

    Args:
        edited: whose calls are where they are asked.
    """

    def __init__(self, edited: Edited) -> None:
        self._edited = edited
        structure = edited.structure
        self._found = {*FUNCTIONS}
        for query in structure.all_queries:
            if edited.calls_in(query.range):
                self._found |= _new_names(edited, query.range)
        lists = [
            [select_items(structure, part) for part in query.selects if "select" in part.clauses]
            for query in structure.all_queries
        ]
        # columns of a set operation have the names of its first SELECT
        columns = [[*filter(None, column)] for items in lists for column in zip_longest(*items)]
        num_before = 0
        while len(self._found) > num_before:
            num_before = len(self._found)
            for items in columns:
                if any(self._found & _names(edited, item) for item in items):
                    for begin, end in items:
                        is_before = structure.is_type(begin + 1, TokenType.COLON)
                        name = begin if is_before else end - 1
                        self._found |= _names(edited, (name, name + 1))

    def are_read(self, tokens: Range) -> bool:
        """Whether an expression reads some, or has a subquery that asks."""
        edited = self._edited
        calls = edited.calls_of(tokens)
        inner = [q for q in edited.structure.all_queries if _is_inside(q.range, tokens)]
        if any(self._asking(query.range, calls) for query in inner):
            return True
        select, _ = edited.structure.innermost(tokens[0])
        source = (0, len(edited.structure.tokens))
        if select is not None:
            source = select.clauses.get("from", (0, 0))
        names = _names(edited, tokens, [call.range for call in calls])
        return bool(names & self._found) and self._asking(source, calls)

    def _asking(self, tokens: Range, but: list[Call]) -> bool:
        return any(
            call not in but
            for found in with_ctes(self._edited, tokens)
            for call in self._edited.calls_in(found)
        )


def _is_inside(tokens: Range, outer: Range) -> bool:
    return outer[0] <= tokens[0] and tokens[1] <= outer[1]


def _new_names(edited: Edited, query: Range) -> set[str]:
    """In the brackets of ``WITH s(a, b) AS (...)`` and ``FROM (...) AS s(a, b)``."""
    found: set[str] = set()
    before = query[0] - 2
    while before > 0 and edited.structure.word(before) in ("AS", "NOT", "MATERIALIZED"):
        before -= 1
    for opening, closing in edited.structure.match.items():
        if opening - query[1] in (2, 3) or closing == before:
            found |= _names(edited, (opening, closing))
    return found


def _names(edited: Edited, tokens: Range, but: Sequence[Range] = ()) -> set[str]:
    structure = edited.structure
    return {
        fold(structure.tokens[number].text)
        for number in range(*tokens)
        if not any(begin <= number < end for begin, end in but)
        and not structure.is_type(number, TokenType.STRING, TokenType.END)
        and (
            structure.is_type(number, TokenType.IDENTIFIER) or structure.word(number).isidentifier()
        )
    }
