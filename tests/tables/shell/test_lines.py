# SPDX-License-Identifier: Apache-2.0
"""Statements from lines."""

from __future__ import annotations

import io

import pytest

from vllm_relay.tables.shell.script import is_complete, read_statements


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("SELECT 1;", True),
        ("SELECT (1));\n", True),
        ("SELECT 1; -- and more", True),
        ("SELECT 1; /* x */ ", True),
        ("SELECT 1", False),
        ("SELECT ';", False),
        ("SELECT ';'", False),
        ("SELECT ';';", True),
        ('SELECT ";', False),
        ("-- nothing;", False),
        ("/* ;", False),
        ("", False),
        (" \n", False),
    ],
)
def test_a_semicolon_ends_a_statement_but_not_in_quotes_and_comments(
    text: str, expected: bool
) -> None:
    assert is_complete(text) is expected


def test_statements_of_several_lines_are_read_one_after_the_other() -> None:
    text = "SELECT 1,\n 2;\nSELECT 'a;\nb';\n\nSELECT 3"
    assert [each.strip() for each in read_statements(io.StringIO(text))] == [
        "SELECT 1,\n 2;",
        "SELECT 'a;\nb';",
        "SELECT 3",
    ]


def test_exit_ends_the_input(capsys: pytest.CaptureFixture[str]) -> None:
    text = ".help\nSELECT 1;\n.exit\nSELECT 2;\n"
    assert [each.strip() for each in read_statements(io.StringIO(text))] == ["SELECT 1;"]
    assert "EXPLAIN" in capsys.readouterr().err
