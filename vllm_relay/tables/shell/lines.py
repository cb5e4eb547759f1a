# SPDX-License-Identifier: Apache-2.0
"""Statements from lines that are typed or piped."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TextIO

import duckdb

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
            import readline  # noqa: F401  # input() edits lines with it
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
