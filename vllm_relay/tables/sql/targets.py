# SPDX-License-Identifier: Apache-2.0
"""What COPY ... TO and CREATE TABLE ... AS write, refused before anything is asked."""

from __future__ import annotations

import os
import re

import duckdb
from sqlglot import exp

from vllm_relay.tables.sql.expressions import fold, text_of

# formats of extensions may have paths of their own
_FORMATS = ("", "csv", "parquet", "json")
# s3://..., file:...; DuckDB has a home of its own
_OTHER_PATH = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:|~")
_ADDING = ("append", "overwrite")


def check_file(copy: exp.Copy) -> None:
    """
    Raises:
        duckdb.IOException: what is written cannot be made where it should be.
    """
    options = {fold(option.name): option.expression for option in copy.args.get("params") or []}
    written = options.get("format")
    path = _local_path(copy)
    if path is None or fold("" if written is None else written.name) not in _FORMATS:
        return
    if os.path.isdir(path):
        # neither a file of that name nor the files of PARTITION_BY and the like
        if _has_files(path) and not any(option.startswith(_ADDING) for option in options):
            raise duckdb.IOException(
                f'IO Error: Directory "{path}" is not empty! Give another path, or, with '
                f"PARTITION_BY, enable OVERWRITE option to overwrite files"
            )
        return
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        reason = "Not a directory" if os.path.exists(folder) else "No such file or directory"
    elif not os.path.exists(path) and not _is_writable(folder):
        reason = "Permission denied"
    else:
        return
    raise duckdb.IOException(
        f'IO Error: Cannot open file "{path}": {reason}\n'
        f'Make the folder "{folder}" one that can be written, or give another path'
    )


def _local_path(copy: exp.Copy) -> str | None:
    """Where the statement writes; None if only DuckDB can tell."""
    files = copy.args.get("files") or []
    path = text_of(files[0]) if len(files) == 1 else None
    if not path or _OTHER_PATH.match(path):
        return None
    return path.rstrip("/") or None


def _has_files(folder: str) -> bool:
    """Whether there are files at any depth; DuckDB takes a folder of empty folders."""
    return any(
        os.path.isfile(os.path.join(inner, name))
        for inner, _, names in os.walk(folder)
        for name in names
    )


def _is_writable(folder: str) -> bool:
    effective = os.access in os.supports_effective_ids
    return os.access(folder, os.W_OK | os.X_OK, effective_ids=effective)


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
