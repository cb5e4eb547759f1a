# SPDX-License-Identifier: Apache-2.0
"""The table that CREATE TABLE ... AS makes, and what has its name already."""

from __future__ import annotations

import duckdb
from sqlglot import exp

from vllm_relay.tables.sql.expressions import fold

_PLACE = """
SELECT current_database(), current_schema(), current_setting('search_path'),
    (SELECT list(database_name) FROM duckdb_databases())
"""
_SAME_NAME = """
SELECT database_name, schema_name, table_name, 'Table' FROM duckdb_tables()
    WHERE lower(table_name) = lower($1)
UNION ALL SELECT database_name, schema_name, view_name, 'View' FROM duckdb_views()
    WHERE lower(view_name) = lower($1)
"""


def check_name(connection: duckdb.DuckDBPyConnection, create: exp.Create) -> None:
    """
    Args:
        create: a statement that DuckDB can bind.

    Raises:
        duckdb.CatalogException: the name is not free.
    """
    if create.args.get("exists"):
        return
    kind = existing_kind(connection, create)
    name = _table(create).name
    if create.args.get("replace"):
        if kind == "View":
            raise duckdb.CatalogException(
                f'Catalog Error: Existing object "{name}" is of type View, trying to replace with '
                f"type Table"
            )
    elif kind is not None:
        raise duckdb.CatalogException(
            f'Catalog Error: {kind} with name "{name}" already exists!\n'
            f"Give another name, or write CREATE OR REPLACE TABLE or CREATE TABLE IF NOT EXISTS"
        )


def existing_kind(connection: duckdb.DuckDBPyConnection, create: exp.Create) -> str | None:
    """ "Table" or "View" if there is one where the table would be made, None otherwise."""
    table = _table(create)
    place = _place(connection, create, table)
    if place is None:
        return None
    rows = connection.execute(_SAME_NAME, [table.name]).fetchall()
    wanted = [fold(name) for name in (*place, table.name)]
    # not by a look-up that fails where there is nothing: that would break a transaction
    return next((row[3] for row in rows if [fold(name) for name in row[:3]] == wanted), None)


def _table(create: exp.Create) -> exp.Table:
    table = create.this.this if isinstance(create.this, exp.Schema) else create.this
    assert isinstance(table, exp.Table)
    return table


def _place(
    connection: duckdb.DuckDBPyConnection, create: exp.Create, table: exp.Table
) -> tuple[str, str] | None:
    """Database and schema; None if they are not certain."""
    if table.catalog:
        return table.catalog, table.db
    properties = create.args.get("properties")
    if properties is not None and properties.find(exp.TemporaryProperty):
        return "temp", "main"
    row = connection.execute(_PLACE).fetchall()[0]
    database, schema, search_path, databases = row
    if not table.db:
        return database, schema
    if fold(table.db) not in map(fold, databases):
        return database, table.db
    if fold(table.db) == fold(database):
        return database, schema
    # a longer search path may have another schema of that database
    return None if "," in search_path else (table.db, "main")
