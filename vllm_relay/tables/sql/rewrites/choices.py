# SPDX-License-Identifier: Apache-2.0
"""CASE, IF and COALESCE in which an answer decides whether another call is asked."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_relay.tables.sql.text.edited import Edited
from vllm_relay.tables.sql.text.structure import Range


def look_at_choices(edited: Edited, aggregates: frozenset[str]) -> None:
    """Have an estimate count all calls among which answers choose, as these are not known."""
    structure = edited.structure
    end = 0
    for tokens, decides in _choices(edited):
        calls = edited.calls_of(tokens)
        deciding = [call for call in calls if any(a <= call.range[0] < b for a, b in decides)]
        words = {structure.word(number).lower() for number in range(*tokens)}
        is_of_rows = not words & {*aggregates, "over"}
        if tokens[0] >= end and deciding and len(calls) > 1 and is_of_rows:
            edited.look_at(tokens)
            end = tokens[1]


def _choices(edited: Edited) -> Iterator[tuple[Range, list[Range]]]:
    """Where they are, and what of them decides."""
    structure = edited.structure
    for number in range(len(structure.tokens)):
        word = structure.word(number)
        if word == "CASE":
            yield from _case(edited, number)
        elif word in ("IF", "IFNULL", "COALESCE") and number + 1 in structure.match:
            closing = structure.match[number + 1]
            arguments = structure.split((number + 2, closing))
            decides = arguments[:1] if word == "IF" else arguments[:-1]
            yield (number, closing + 1), decides


def _case(edited: Edited, begin: int) -> Iterator[tuple[Range, list[Range]]]:
    structure = edited.structure
    decides: list[Range] = []
    depth, since = 0, begin
    for number in range(begin, len(structure.tokens)):
        word = structure.word(number)
        depth += (word == "CASE") - (word == "END")
        if depth == 0:
            yield (begin, number + 1), decides
            return
        if depth == 1 and word in ("WHEN", "THEN", "ELSE"):
            if structure.word(since) in ("CASE", "WHEN"):
                decides.append((since, number))
            since = number
