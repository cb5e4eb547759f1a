# SPDX-License-Identifier: Apache-2.0
"""Passages of this project's documentation and code.

What a default is chosen on is never what is reported: the documentation's pages from A to M are for
choosing and those from N on for reporting, and of the code the scheduler and the prefix cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[3]
LEFT_OUT = ("benchmarks.md",)  # mostly numbers
LAST_PAGE_FOR_CHOOSING = "n"  # the first letter that is not


class Passage(NamedTuple):
    kind: str
    token_ids: list[int]


def files(kind: str, part: str) -> list[Path]:
    """kind: "English" or "code"; part: "choosing" or "reporting"."""
    if kind == "code":
        room = {"choosing": "scheduler", "reporting": "prefix_cache"}[part]
        return sorted((ROOT / "vllm_relay" / room).rglob("*.py"))
    pages = [page for page in sorted(ROOT.glob("docs/*.md")) if page.name not in LEFT_OUT]
    for_choosing = part == "choosing"
    return [page for page in pages if (page.name < LAST_PAGE_FOR_CHOOSING) == for_choosing]


def passages(tokenizer: Any, kind: str, part: str, lengths: list[int]) -> list[Passage]:
    """One behind the other, of these lengths in tokens.

    Raises:
        ValueError: the files have fewer tokens.
    """
    text = "\n\n".join(path.read_text() for path in files(kind, part))
    tokens = tokenizer.encode(text, verbose=False)
    if len(tokens) < sum(lengths):
        raise ValueError(
            f"{sum(lengths):,} tokens of {kind} for {part}, expected at most {len(tokens):,}: "
            "give shorter lengths"
        )
    found, begin = [], 0
    for length in lengths:
        found.append(Passage(kind, tokens[begin : begin + length]))
        begin += length
    return found
