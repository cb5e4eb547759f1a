# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a statement as a whole, before anything is asked."""

from __future__ import annotations

import duckdb
from sqlglot import exp

from vllm_relay.tables.sql.copied_files import check_file
from vllm_relay.tables.sql.created_tables import check_name, existing_kind
from vllm_relay.tables.sql.errors import error_at
from vllm_relay.tables.sql.expressions import has_call, sql_of
from vllm_relay.tables.sql.probe import name_calls, probe
from vllm_relay.tables.sql.statements import with_query


def check_statement(connection: duckdb.DuckDBPyConnection, tree: exp.Expr) -> None:
    """
    Raises:
        SqlError: a call is not called as it should be, or stands where it cannot be answered.
        duckdb.Error: DuckDB does not take the statement with any answers.
    """
    _check_ends(tree)
    probed, is_query = _probed(tree)
    if not _has_columns_of_data(tree):
        # EXPLAIN of what is no query has no effect; DESCRIBE binds only
        text = f"{'DESCRIBE' if is_query else 'EXPLAIN'} {sql_of(probed)}"
        try:
            connection.execute(text).fetchall()
        except duckdb.Error as error:
            raise _about(tree, error) from None
    # of these EXPLAIN says nothing
    if isinstance(tree, exp.Create):
        check_name(connection, tree)
    elif isinstance(tree, exp.Copy):
        check_file(tree)


def without_asking(connection: duckdb.DuckDBPyConnection, tree: exp.Expr) -> str | None:
    """A statement that does the same for whatever answers; None if they matter.

    Args:
        tree: of a statement that was checked.
    """
    if not isinstance(tree, exp.Create) or _has_columns_of_data(tree):
        return None
    exists = tree.args.get("exists") and existing_kind(connection, tree) is not None
    if not exists and not _has_no_data(tree):
        return None
    return f"{sql_of(_probed(tree)[0])} WITH NO DATA"


def _probed(tree: exp.Expr) -> tuple[exp.Expr, bool]:
    probed, is_query = with_query(tree, lambda query: probe(name_calls(query)))
    for part in list(probed.find_all(exp.WithDataProperty)):
        part.pop()  # sqlglot cannot write it
    return probed, is_query


def _about(tree: exp.Expr, error: duckdb.Error) -> duckdb.Error:
    """The error as one of the statement that was given, so without an excerpt of another one."""
    message = str(error).split("\n\nLINE ")[0]
    return type(error)(message.replace('of type "EXPLAIN"', f'of type "{tree.key.upper()}"'))


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


def _check_ends(tree: exp.Expr) -> None:
    """Calls in what follows a UNION or brackets, which is no part of a SELECT."""
    for query in tree.find_all(exp.SetOperation, exp.Subquery):
        for key in ("order", "limit", "offset"):
            end = query.args.get(key)
            if end is not None and has_call(end):
                raise error_at(
                    end, "llm() where it cannot be asked: ask in the select list of a subquery"
                )
