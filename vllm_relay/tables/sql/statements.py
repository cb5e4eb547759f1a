# SPDX-License-Identifier: Apache-2.0
"""Statements: which of them call llm(), and where their query is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError
from sqlglot.tokens import Token, TokenType

from vllm_relay.tables.sql.errors import SqlError, error_at
from vllm_relay.tables.sql.expressions import DIALECT, FUNCTION, has_call


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
    except SqlglotError:
        # DuckDB says what is wrong with it
        return [Statement(text)]
    if not _calls(tokens):
        return [Statement(text)]
    statements: list[Statement] = []
    current: list[Token] = []
    for token in [*tokens, None]:
        if token is not None and token.token_type != TokenType.SEMICOLON:
            current.append(token)
            continue
        if current:
            statements.append(_statement(text, current))
        current = []
    return statements


def _statement(text: str, tokens: list[Token]) -> Statement:
    begin, end = tokens[0].start, tokens[-1].end + 1
    own = text[begin:end]
    if not _calls(tokens):
        return Statement(own)
    is_explained = tokens[0].text.upper() == "EXPLAIN"
    if is_explained:
        if len(tokens) > 1 and tokens[1].text.upper() == "ANALYZE":
            raise SqlError(
                "EXPLAIN ANALYZE of a query with llm() given: EXPLAIN asks nothing, and the "
                "result of the query itself has a report"
            )
        begin = tokens[1].start
    # spaces keep lines and columns
    before = "".join(c if c == "\n" else " " for c in text[:begin])
    try:
        tree = sqlglot.parse_one(before + text[begin:end], dialect=DIALECT)
    except SqlglotError as error:
        raise SqlError(f"a statement with llm() cannot be read: {error}") from None
    return Statement(own, tree, is_explained)


def _calls(tokens: list[Token]) -> bool:
    return any(
        token.text.lower() == FUNCTION
        and token.token_type != TokenType.STRING
        and after.token_type == TokenType.L_PAREN
        for token, after in zip(tokens, tokens[1:], strict=False)
    )


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
