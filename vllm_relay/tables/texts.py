# SPDX-License-Identifier: Apache-2.0
"""Texts of any length in messages of one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_MESSAGE_CHARS = 400
_MAX_CELL_CHARS = 60


def shortened(text: str, max_chars: int = MAX_MESSAGE_CHARS) -> str:
    """A text of so many characters at most: its beginning and its end."""
    if len(text) <= max_chars:
        return text
    gap = " ... "
    num_last = max_chars // 3
    return text[: max_chars - num_last - len(gap)] + gap + text[-num_last:]


def row_text(fields: Mapping[str, Any]) -> str:
    """The cells of a row by name, each shortened."""
    return ", ".join(
        f"{name}={shortened(repr(value), _MAX_CELL_CHARS)}" for name, value in fields.items()
    )
