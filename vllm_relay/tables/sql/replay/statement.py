# SPDX-License-Identifier: Apache-2.0
"""What a statement is, and what is wrong with it before anything is asked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import duckdb
import sqlglot
from sqlglot import exp
from sqlglot.errors import ParseError, TokenError
from sqlglot.tokens import Token, TokenType

from vllm_relay.tables.sql.database import columns
from vllm_relay.tables.sql.expressions import DIALECT, FUNCTIONS, SqlError
from vllm_relay.tables.sql.targets import check_file, check_name, existing_kind
from vllm_relay.tables.sql.text.edited import Edited
from vllm_relay.tables.sql.text.structure import Query

Kind = Literal["query", "of query", "bound", "change"]

_EXPLAIN = re.compile(r"EXPLAIN\b\s*(?P<analyze>ANALYZE\b\s*)?(\((?P<options>[^)]*)\)\s*)?", re.I)
_CHANGES = ("INSERT", "UPDATE", "DELETE", "MERGE", "CREATE", "COPY")
_KNOWN = (
    *_CHANGES,
    *("SELECT", "FROM", "WITH", "(", "VALUES", "PIVOT", "UNPIVOT", "DESCRIBE", "SUMMARIZE"),
)


@dataclass(frozen=True)
class Given:
    """
    Attributes:
        text: as it was given.
        body: that without EXPLAIN, after spaces and lines that keep its place.
        has_call: whether it calls llm().
        is_explained: whether it begins with EXPLAIN.
    """

    text: str
    body: str = ""
    has_call: bool = False
    is_explained: bool = False


def split(text: str) -> list[Given]:
    """The statements of a text.

    Raises:
        SqlError: EXPLAIN ANALYZE of one with a call.
    """
    try:
        tokens = sqlglot.tokenize(text, dialect=DIALECT)
        found: list[Given] = []
        current: list[Token] = []
        for token in [*tokens, None]:
            if token is not None and token.token_type != TokenType.SEMICOLON:
                current.append(token)
            elif current:
                found.append(_given(text, current[0].start, current[-1].end + 1))
                current = []
    except TokenError:
        # DuckDB says what is wrong with it
        return [Given(text)]
    return found if any(given.has_call for given in found) else [Given(text)]


def _given(text: str, begin: int, end: int) -> Given:
    own = text[begin:end]
    explain = _EXPLAIN.match(own)
    if explain is not None:
        begin += explain.end()
    if not _calls(sqlglot.tokenize(text[begin:end], dialect=DIALECT)):
        return Given(own)
    if explain is not None and (
        explain["analyze"] or "ANALYZE" in (explain["options"] or "").upper()
    ):
        raise SqlError(
            "EXPLAIN ANALYZE of a query with llm() given: EXPLAIN asks nothing, and the result of "
            "the query itself has a report"
        )
    # spaces keep lines and columns
    before = "".join(c if c == "\n" else " " for c in text[:begin])
    return Given(own, before + text[begin:end], True, explain is not None)


def tree_of(text: str) -> exp.Expr | None:
    """What sqlglot makes of a statement, to look at it; None if it cannot."""
    try:
        return sqlglot.parse_one(text, dialect=DIALECT)
    except ParseError:
        return None


def kind_of(edited: Edited) -> Kind:
    """
    Raises:
        SqlError: a statement of this kind cannot call llm().
    """
    structure = edited.structure
    first = structure.word(0)
    words = [structure.word(number) for number in structure.flat((0, len(structure.tokens)))]
    what = next((word for word in words if word in _CHANGES), "") if first == "WITH" else first
    if first == "CREATE":
        what = "TABLE" if "TABLE" in words[:5] else "other"
        kind = next((word for word in words[1:5] if word not in ("OR", "REPLACE", "TEMP")), "")
        if what == "other":
            raise _refused(f"CREATE {kind}")
    elif first not in _KNOWN:
        raise _refused(first)
    if first in ("DESCRIBE",):
        return "bound"
    if first in ("INSERT", "CREATE", "COPY", "SUMMARIZE"):
        query = query_of(edited)
        if query is not None:
            return "of query"
        if first != "INSERT":
            raise _refused(first)
        return "change"
    return "change" if what in _CHANGES else "query"


def query_of(edited: Edited) -> Query | None:
    """The query of a statement that is more than that, if all calls are in it."""
    for query in reversed(edited.structure.queries):
        if len(edited.calls_in(query.range)) == len(edited.calls):
            return query
    return None


def _refused(what: str) -> SqlError:
    return SqlError(
        f"llm() in {what}: expected SELECT, CREATE TABLE ... AS SELECT, INSERT, UPDATE, DELETE, "
        f"MERGE or COPY (SELECT ...) TO. A view cannot ask: make a table"
    )


def check(edited: Edited, kind: Kind) -> bool:
    """Whether answers matter for what a statement does.

    Raises:
        SqlError: a call stands where it cannot be answered.
        duckdb.Error: DuckDB does not take the statement with any answers.
    """
    connection = edited.connection
    text = edited.text().strip()
    tree = tree_of(edited.structure.text)
    _check_recursion(edited)
    # PIVOT takes its columns from answers; SUMMARIZE has no EXPLAIN
    is_bound = not (tree is not None and _has_columns_of_data(tree))
    is_bound = is_bound and edited.structure.word(0) != "SUMMARIZE"
    try:
        if kind == "query" and is_bound:
            columns(connection, f"FROM ({text}) LIMIT 0")
            connection.execute(f"DESCRIBE {text}").fetchall()
        elif kind in ("of query", "change") and is_bound:
            connection.execute(f"EXPLAIN {text}").fetchall()
    except duckdb.Error as error:
        message = str(error).split("\n\nLINE ")[0]
        named = message.replace('of type "EXPLAIN"', f'of type "{edited.structure.word(0)}"')
        raise type(error)(named) from None
    if isinstance(tree, exp.Create):
        exists = tree.args.get("exists") and existing_kind(connection, tree) is not None
        if exists or _has_no_data(tree):
            return False
        check_name(connection, tree)
    elif isinstance(tree, exp.Copy):
        check_file(tree)
    return True


def _check_recursion(edited: Edited) -> None:
    structure = edited.structure
    for query in structure.all_queries:
        for name, cte in query.ctes if query.is_recursive else []:
            names = [token.text.lower() for token in structure.tokens[slice(*cte.range)]]
            if name.lower() in names and edited.calls_in(cte.range):
                raise SqlError(f"llm() in WITH RECURSIVE {name!r}: it cannot be answered")


def _calls(tokens: list[Token]) -> bool:
    for token, after in zip(tokens, [*tokens[1:], None], strict=True):
        if token.token_type == TokenType.STRING:
            # a command of which sqlglot knows no more than its first word
            is_command = tokens[0].token_type == TokenType.COMMAND and token is tokens[1]
            if is_command and _calls(sqlglot.tokenize(token.text, dialect=DIALECT)):
                return True
        elif (
            token.text.lower() in FUNCTIONS
            and after is not None
            and after.token_type == TokenType.L_PAREN
        ):
            return True
    return False


def _has_no_data(create: exp.Create) -> bool:
    properties = create.args.get("properties")
    found = None if properties is None else properties.find(exp.WithDataProperty)
    return found is not None and bool(found.args.get("no"))


def _has_columns_of_data(tree: exp.Expr) -> bool:
    """Whether a PIVOT takes its columns from rows: with other answers it has other columns."""
    return any(
        not pivot.args.get("unpivot") and not pivot.args.get("fields")
        for pivot in tree.find_all(exp.Pivot)
    )


def gives_rows(given: Given) -> bool:
    """Whether a statement with a call gives rows, more than their number."""
    words = [token.text.upper() for token in sqlglot.tokenize(given.body, dialect=DIALECT)]
    is_query = words[0] not in _CHANGES and not (
        words[0] == "WITH" and any(word in _CHANGES for word in words)
    )
    return given.is_explained or is_query or "RETURNING" in words
