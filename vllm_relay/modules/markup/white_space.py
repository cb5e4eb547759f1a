# SPDX-License-Identifier: Apache-2.0
"""Which white space of a PML file is text and which only lays the file out.

- The indentation that all lines of an element have in common is layout.
- So are blank lines and spaces around the text of an element, and where a module, union or turn
  begins or ends; but if a line break ends a text, one line break stays.
- Everything else is text: line breaks and further indentation, as code has them.
- `xml:space="preserve"` makes all of it text, in an element and those within.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

_INDENTATION = re.compile(r"\n([^\S\n]*)(?=[^\s])")
_OPENING = re.compile(r"\A(?:[^\S\n]*\n)+")


def texts_of(parts: Sequence[str | bool]) -> list[str | bool]:
    """The texts of an element without layout; texts that are only layout become "".

    Args:
        parts: its children: texts, True for what stands in a line of text, False for what begins
            and ends texts.
    """
    indentation = _common_indentation(parts)
    result: list[str | bool] = []
    for number, part in enumerate(parts):
        if not isinstance(part, str):
            result.append(part)
            continue
        begins = number == 0 or parts[number - 1] is False
        ends = number + 1 == len(parts) or parts[number + 1] is False
        result.append(_without_layout(part, indentation, begins, ends))
    return result


def _common_indentation(parts: Sequence[str | bool]) -> str:
    """Of all lines that begin in these texts."""
    found: list[str] = []
    for number, part in enumerate(parts):
        if isinstance(part, str):
            goes_on = number + 1 < len(parts) and parts[number + 1] is True
            found += _INDENTATION.findall(part + "x" if goes_on else part)
    return os.path.commonprefix(found)


def _without_layout(text: str, indentation: str, begins: bool, ends: bool) -> str:
    text = re.sub(rf"\n(?:{re.escape(indentation)}|[^\S\n]+(?=\n|\Z))", "\n", text)
    if begins and ends and not text.strip():
        return "" if "\n" in text else text
    if begins:
        text = _OPENING.sub("", text)
    if ends:
        kept = text.rstrip()
        if "\n" in text[len(kept) :]:
            text = kept + "\n"
    return text
