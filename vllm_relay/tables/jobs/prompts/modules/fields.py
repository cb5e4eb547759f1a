# SPDX-License-Identifier: Apache-2.0
"""What of a field's values can be a module, and the text around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_relay.tables.jobs.prompts.format import PromptTemplate
from vllm_relay.tables.jobs.prompts.set_fields import list_elements
from vllm_relay.tables.ordering.columns import Column

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
