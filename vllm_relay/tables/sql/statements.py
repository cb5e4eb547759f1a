# SPDX-License-Identifier: Apache-2.0
"""Statements: which of them call llm(), and where their query is."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import sqlglot
from sqlglot import exp
from sqlglot.errors import ParseError, TokenError
from sqlglot.tokens import Token, TokenType

from vllm_relay.tables.sql.errors import SqlError, error_at
from vllm_relay.tables.sql.expressions import DIALECT, FUNCTION, has_call

_EXPLAIN = re.compile(r"EXPLAIN\b\s*(?P<analyze>ANALYZE\b\s*)?", re.IGNORECASE)


@dataclass(frozen=True)
class Statement:
    """
    Attributes:
        text: as it was given.
        tree: of the statement without EXPLAIN; None if it does not call llm().
        is_explained: whether it begins with EXPLAIN.
    """

    text: str
    tree: exp.Expr | None = None
    is_explained: bool = False


def split_statements(text: str) -> list[Statement]:
    """The statements of a text.

    Raises:
        SqlError: one that calls llm() cannot be read.
    """
    try:
        tokens = sqlglot.tokenize(text, dialect=DIALECT)
        statements: list[Statement] = []
        current: list[Token] = []
        for token in [*tokens, None]:
            if token is not None and token.token_type != TokenType.SEMICOLON:
                current.append(token)
            elif current:
                statements.append(_statement(text, current[0].start, current[-1].end + 1))
                current = []
    except TokenError:
        # DuckDB says what is wrong with it
        return [Statement(text)]
    if all(statement.tree is None for statement in statements):
        return [Statement(text)]
    return statements


def _statement(text: str, begin: int, end: int) -> Statement:
    own = text[begin:end]
    explain = _EXPLAIN.match(own)
    if explain is not None:
        begin += explain.end()
    if not _calls(sqlglot.tokenize(text[begin:end], dialect=DIALECT)):
        return Statement(own)
    if explain is not None and explain["analyze"]:
        raise SqlError(
            "EXPLAIN ANALYZE of a query with llm() given: EXPLAIN asks nothing, and the result of "
            "the query itself has a report"
        )
    # spaces keep lines and columns
    before = "".join(c if c == "\n" else " " for c in text[:begin])
    try:
        tree = sqlglot.parse_one(before + text[begin:end], dialect=DIALECT)
    except ParseError as error:
        raise SqlError(f"a statement with llm() cannot be read: {error}") from None
    return Statement(own, tree, explain is not None)


def _calls(tokens: list[Token]) -> bool:
    for token, after in zip(tokens, [*tokens[1:], None], strict=True):
        if token.token_type == TokenType.STRING:
            # a command of which sqlglot knows no more than its first word
            is_command = tokens[0].token_type == TokenType.COMMAND and token is tokens[1]
            if is_command and _calls(sqlglot.tokenize(token.text, dialect=DIALECT)):
                return True
        elif (
            token.text.lower() == FUNCTION
            and after is not None
            and after.token_type == TokenType.L_PAREN
        ):
            return True
    return False


def with_query(tree: exp.Expr, change: Callable[[exp.Query], exp.Query]) -> tuple[exp.Expr, bool]:
    """The statement with its query changed, and whether it is a query itself.

    Raises:
        SqlError: a statement of this kind cannot call llm().
    """
    if isinstance(tree, exp.Query):
        return change(tree), True
    query: exp.Expr | None = None
    if isinstance(tree, exp.Create) and tree.kind == "TABLE" or isinstance(tree, exp.Insert):
        query = tree.expression
    elif isinstance(tree, exp.Copy):
        query = tree.this
    if isinstance(query, exp.Query) and not tree.args.get("with_"):
        tree = tree.copy()
        key = "this" if isinstance(tree, exp.Copy) else "expression"
        tree.set(key, change(query))
        if not has_call(tree):
            return tree, False
    what = tree.kind or "" if isinstance(tree, exp.Create) else ""
    raise error_at(
        tree,
        f"llm() in {tree.key.upper()} {what}".rstrip()
        + ": expected SELECT, CREATE TABLE ... AS SELECT, INSERT INTO ... SELECT or "
        "COPY (SELECT ...) TO. A view cannot ask: make a table",
    )
