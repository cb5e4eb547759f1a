# SPDX-License-Identifier: Apache-2.0
"""docs/compatibility.md names tests that are there, and says for every cell what was done."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "compatibility.md").read_text()
ANSWERS = ("yes", "refused", "no effect", "not run")
ROWS = [line.strip("|").split("|") for line in PAGE.splitlines() if line.startswith("| ")]
NAMED_TESTS = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))
NOTES = dict(re.findall(r"^- ([a-zA-Z]): (.*(?:\n  .*)*)", PAGE, re.MULTILINE))


@cache
def functions(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def letters(cell: str) -> list[str]:
    return re.findall(r"\b([a-zA-Z])\b", cell)


@pytest.mark.parametrize(("path", "name"), NAMED_TESTS, ids=lambda each: Path(each).stem)
def test_named_tests_are_there(path: str, name: str) -> None:
    assert name in functions(path)


def test_every_cell_says_what_was_done() -> None:
    header, *rows = ROWS
    assert len(rows) > 15
    for feature, *cells in rows:
        assert len(cells) == len(header) - 1, feature
        for cell in cells:
            assert cell.strip().startswith(ANSWERS), (feature, cell)
            assert set(letters(cell)) <= NOTES.keys(), (feature, cell)
            if cell.strip().startswith("yes"):
                assert any("::" in NOTES[letter] for letter in letters(cell)), (feature, cell)


def test_every_note_is_used() -> None:
    used = {letter for _, *cells in ROWS[1:] for cell in cells for letter in letters(cell)}
    assert used == NOTES.keys()
