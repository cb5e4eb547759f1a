# SPDX-License-Identifier: Apache-2.0
"""Answers without what models put around them, where it is certain what is meant."""

from __future__ import annotations

import re
from collections.abc import Sequence

_FENCED = re.compile(r"```[A-Za-z]*\s*(.*?)\s*```", re.DOTALL)
_AROUND = (("**", "**"), ("`", "`"), ('"', '"'), ("'", "'"), ("\u201c", "\u201d"))
_BOOLS = {"true": True, "yes": True, "false": False, "no": False}


def without_fence(text: str) -> str:
    """A text, or what its only code block holds if there is nothing else."""
    text = text.strip()
    found = _FENCED.fullmatch(text)
    return found[1] if found is not None and "```" not in found[1] else text


def bare(text: str) -> str:
    """A text without a code block, quotes, emphasis and a full stop around it."""
    text = without_fence(text)
    while True:
        before = text
        text = text.strip().removesuffix(".").rstrip()
        for begin, end in _AROUND:
            if len(text) > len(begin + end) and text.startswith(begin) and text.endswith(end):
                text = text[len(begin) : -len(end)]
        if text == before:
            return text


def chosen(text: str, choices: Sequence[str]) -> str | None:
    """The choice that a text is, or the only one that it is but for case and what `bare` leaves
    out; None if there is no such choice.
    """
    for each in (text.strip(), bare(text)):
        if each in choices:
            return each
    found = [each for each in choices if bare(each).casefold() == bare(text).casefold()]
    return found[0] if len(found) == 1 else None


def truth(text: str) -> bool | None:
    """Of true and false, yes and no, in any case; None if it is none of them."""
    return _BOOLS.get(bare(text).lower())
