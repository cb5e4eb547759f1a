# SPDX-License-Identifier: Apache-2.0
"""Which values of a table are modules, and at which positions they stand.

A module has the same positions in all prompts. So every place of a prompt begins at a position of
its own and is as long as the longest value that may stand there. A field has one place. A field
whose value is a set has several: each element has one place in all rows, chosen such that no two
elements of a row have the same, and is computed once however many rows have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from vllm_relay.tables.jobs.prompts.format import PromptTemplate
from vllm_relay.tables.jobs.prompts.set_fields import list_elements
from vllm_relay.tables.ordering.columns import Column

ModuleMode = Literal["off", "modular", "repair"]

_MARK = "\N{REPLACEMENT CHARACTER}elements\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class FieldPieces:
    """Rendered values of a field: opening, pieces with separators between them, closing.

    Attributes:
        opening, separator, closing: texts that stay texts.
        pieces: of each distinct value, [distinct values][pieces]; none where the value is no list,
            and has no pieces in the sense of the others.
    """

    opening: str
    separator: str
    closing: str
    pieces: list[list[str]]


def whole_values(lines: Sequence[str], end: str) -> FieldPieces:
    """A value is one piece, with the name of its field.

    Args:
        lines: the rendered field of each distinct value.
        end: what these end with, unless they are a prompt's last.
    """
    return FieldPieces("", "", end, [[line.removesuffix(end)] for line in lines])


def set_elements(column: Column, template: PromptTemplate) -> FieldPieces | None:
    """An element is a piece; None if the template does not write a value exactly once.

    Args:
        column: of JSON values.
    """
    around = template.render_field(column.name, f"[{_MARK}]").split(_MARK)
    if len(around) != 2:
        return None
    pieces = [list_elements(text) or [] for text in column.texts]
    return FieldPieces(around[0], ", ", around[1], pieces)


MIN_MODULE_BLOCKS = 2
"""Full KV blocks that a value has at least: shorter ones would be padding for the most part."""
MIN_MODULE_ROWS = 2
"""Rows that have a value at least."""
_FITTING_SHARE = 0.95
"""Of the rows, that are to have room for what no module holds."""

TokensOf = Callable[[list[str]], Iterable[Sequence[int]]]


@dataclass(frozen=True)
class PlacedModule:
    """
    Attributes:
        number: unique in a layout, from 1 on.
        name: for people.
        text: as it stands in the prompt.
        token_ids: of the text.
        position: of the first token.
    """

    number: int
    name: str
    text: str
    token_ids: list[int]
    position: int

    @property
    def end_position(self) -> int:
        return self.position + len(self.token_ids)


@dataclass
class _Candidate:
    """A piece that rows share.

    Attributes:
        column: number of its field.
        codes: of the distinct values that have it.
        num_rows: that have it.
        place: of its field, once it has one.
    """

    column: int
    text: str
    token_ids: list[int]
    codes: list[int]
    num_rows: int
    place: int = -1


@dataclass
class _Places:
    """Of a field.

    Attributes:
        lengths: positions that each place takes.
        taken: places by distinct value.
    """

    opening_tokens: int
    gap_tokens: int
    lengths: list[int] = field(default_factory=list)
    taken: dict[int, set[int]] = field(default_factory=dict)

    def best(self, candidate: _Candidate) -> tuple[int, int]:
        """The place that grows least, the first of several, and by how many positions."""
        needed = len(candidate.token_ids) + self.gap_tokens
        taken = set().union(*(self.taken.get(code, ()) for code in candidate.codes))
        opening = 0 if self.lengths else self.opening_tokens
        growths = [
            (max(needed - length, 0), place)
            for place, length in enumerate(self.lengths)
            if place not in taken
        ]
        growth, place = min([*growths, (needed + opening, len(self.lengths))])
        return place, growth

    def put(self, candidate: _Candidate, place: int) -> None:
        needed = len(candidate.token_ids) + self.gap_tokens
        if place == len(self.lengths):
            self.lengths.append(0)
        self.lengths[place] = max(self.lengths[place], needed)
        for code in candidate.codes:
            self.taken.setdefault(code, set()).add(place)
        candidate.place = place


def place_modules(
    columns: Sequence[Column],
    fields: Sequence[FieldPieces],
    tokens_of: TokensOf,
    *,
    row_tokens: npt.NDArray[np.int64],
    block_size_tokens: int,
    first_position: int,
    max_positions: int | None,
) -> list[dict[str, PlacedModule]]:
    """The modules of each field, by their text.

    A piece that at least `MIN_MODULE_ROWS` rows have and that fills at least `MIN_MODULE_BLOCKS` KV
    blocks becomes a module, those of most rows first, as long as there are positions.

    Args:
        fields: the pieces of the columns' values.
        row_tokens: of each row's whole prompt, int64 [rows].
        first_position: behind what all prompts begin with.
        max_positions: that a prompt may take; None has no limit.
    """
    candidates: list[_Candidate] = []
    rest = row_tokens.copy()
    for number, (column, pieces) in enumerate(zip(columns, fields, strict=True)):
        found = _candidates(number, column, pieces, tokens_of, block_size_tokens)
        candidates += found
        of_code = np.zeros(column.num_values, np.int64)
        for each in found:
            of_code[each.codes] += len(each.token_ids)
        rest -= of_code[column.codes]
    if not candidates:
        return [{} for _ in columns]
    left = None
    if max_positions is not None:
        # with what all prompts begin with
        left = max_positions - int(np.quantile(rest, _FITTING_SHARE))
    places = [_places(pieces, tokens_of) for pieces in fields]
    # those of the same rows: the longest first, so that places need not grow
    for each in sorted(candidates, key=lambda each: (-each.num_rows, -len(each.token_ids))):
        place, growth = places[each.column].best(each)
        if left is not None:
            if growth > left:
                continue
            left -= growth
        places[each.column].put(each, place)
    return _placed(columns, candidates, places, first_position)


def _candidates(
    number: int,
    column: Column,
    pieces: FieldPieces,
    tokens_of: TokensOf,
    block_size_tokens: int,
) -> list[_Candidate]:
    rows_of_code = np.bincount(column.codes, minlength=column.num_values).tolist()
    codes_of: dict[str, list[int]] = {}
    for code, texts in enumerate(pieces.pieces):
        if rows_of_code[code]:
            for text in dict.fromkeys(texts):
                codes_of.setdefault(text, []).append(code)
    num_rows = {
        text: count
        for text, codes in codes_of.items()
        if (count := sum(rows_of_code[code] for code in codes)) >= MIN_MODULE_ROWS
    }
    shared = list(num_rows)
    return [
        _Candidate(number, text, list(token_ids), codes_of[text], num_rows[text])
        for text, token_ids in zip(shared, tokens_of(shared), strict=True)
        if len(token_ids) >= MIN_MODULE_BLOCKS * block_size_tokens
    ]


def _places(pieces: FieldPieces, tokens_of: TokensOf) -> _Places:
    opening, separator, closing = (
        len(token_ids)
        for token_ids in tokens_of([pieces.opening, pieces.separator, pieces.closing])
    )
    return _Places(opening, max(separator, closing))


def _placed(
    columns: Sequence[Column],
    candidates: Sequence[_Candidate],
    places: Sequence[_Places],
    first_position: int,
) -> list[dict[str, PlacedModule]]:
    """In the order of the columns."""
    begins: list[list[int]] = []
    position = first_position
    for of_field in places:
        begins.append([])
        position += of_field.opening_tokens if of_field.lengths else 0
        for length in of_field.lengths:
            begins[-1].append(position)
            position += length
    placed: list[dict[str, PlacedModule]] = [{} for _ in columns]
    for number, each in enumerate(candidates, 1):
        if each.place >= 0:
            placed[each.column][each.text] = PlacedModule(
                number,
                f"{columns[each.column].name} {number}",
                each.text,
                each.token_ids,
                begins[each.column][each.place],
            )
    return placed
