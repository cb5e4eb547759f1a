# SPDX-License-Identifier: Apache-2.0
"""Statements from lines that are typed or piped, and which of them give rows for a file."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from typing import TextIO

import duckdb

from vllm_relay.tables.sql.replay import statement as calling
from vllm_relay.tables.sql.replay.statement import Given

_Kind = duckdb.StatementType
_WITH_ROWS = (
    _Kind.SELECT,
    _Kind.EXPLAIN,
    _Kind.PRAGMA,
    _Kind.CALL,
    _Kind.EXECUTE,
    _Kind.MULTI,  # PIVOT
)
_WITH_RETURNING = (_Kind.INSERT, _Kind.UPDATE, _Kind.DELETE, _Kind.MERGE_INTO)
_SHOWN_CHARACTERS = 60


def gives_rows(connection: duckdb.DuckDBPyConnection, statement: Given) -> bool | None:
    """Whether a statement gives rows, more than their number; None if it is empty.

    Raises:
        duckdb.Error: it cannot be read.
    """
    if statement.has_call:
        return calling.gives_rows(statement)
    # without llm() there may be several
    parts = connection.extract_statements(statement.text)
    if not parts:
        return None
    kind = parts[-1].type
    return kind in _WITH_ROWS or (kind in _WITH_RETURNING and _has_returning(parts[-1].query))


def place_of_output(connection: duckdb.DuckDBPyConnection, statements: Sequence[Given]) -> int:
    """The place of the last statement, whose rows are written.

    Raises:
        ValueError: it gives none, or there is no statement.
        duckdb.Error: it cannot be read.
    """
    for place, statement in reversed(list(enumerate(statements))):
        has_rows = gives_rows(connection, statement)
        if has_rows:
            return place
        if has_rows is not None:
            raise ValueError(
                f"--output given, but the last statement gives no rows: "
                f"{_shown(_last_part(connection, statement))}; "
                f"end with a SELECT, or leave out --output"
            )
    raise ValueError("--output given without a statement, expected one that gives rows: SELECT ...")


def _last_part(connection: duckdb.DuckDBPyConnection, statement: Given) -> str:
    if statement.has_call:
        return statement.text
    # DuckDB before 2.0 has no text of some
    return connection.extract_statements(statement.text)[-1].query.strip() or statement.text


def _has_returning(text: str) -> bool:
    return any(
        kind == duckdb.token_type.keyword and text[at : at + 9].upper() == "RETURNING"
        for at, kind in duckdb.tokenize(text)
    )


def _shown(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]}..."


_PROMPT, _CONTINUED = "sql> ", "...> "
_END = {".exit", ".quit", "exit", "quit"}
HELP = """statements end with a semicolon; llm() asks the model:
  SELECT llm('Is {title} suitable for kids?', {title, info}, choices := ['Yes', 'No']) FROM movies;
  EXPLAIN SELECT llm(...) ...;    what it would take, without asking
  SHOW TABLES;  DESCRIBE movies;  what there is
  .help  .exit"""


def read_statements(source: TextIO) -> Iterator[str]:
    """Each statement when it is complete, and what is left at the end.

    A terminal is prompted; Ctrl-C there forgets what was typed.
    """
    is_terminal = source.isatty()
    if is_terminal:
        with suppress(ImportError):
            import_module("readline")  # input() edits lines with it
        print("type .help for help, .exit to leave", file=sys.stderr)
    pending = ""
    while True:
        try:
            line = input(_CONTINUED if pending else _PROMPT) if is_terminal else _read(source)
        except KeyboardInterrupt:
            print(file=sys.stderr)
            pending = ""
            continue
        except EOFError:
            break
        if not pending.strip() and line.strip().lower() in _END:
            return
        if not pending.strip() and line.strip().lower() in (".help", "help"):
            print(HELP, file=sys.stderr)
            continue
        pending += line + "\n"
        if is_complete(pending):
            yield pending
            pending = ""
    if pending.strip():
        yield pending


def is_complete(text: str) -> bool:
    """Whether a text ends with a semicolon, and not one in quotes or in a comment."""
    tokens = [at for at, kind in duckdb.tokenize(text) if kind != duckdb.token_type.comment]
    return bool(tokens) and text[tokens[-1] :].lstrip().startswith(";")


def _read(source: TextIO) -> str:
    line = source.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")
