# SPDX-License-Identifier: Apache-2.0
"""Files as tables of a DuckDB connection."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import duckdb

from vllm_relay.tables.texts import literal, quoted

_DATABASES = (".duckdb", ".db", ".ddb")
_READERS = {
    ".csv": "read_csv",
    ".tsv": "read_csv",
    ".parquet": "read_parquet",
    ".json": "read_json",
    ".jsonl": "read_json",
    ".ndjson": "read_json",
}
_COMPRESSED = (".gz", ".zst")
_WRITERS = {
    ".csv": "FORMAT csv, HEADER",
    ".parquet": "FORMAT parquet",
    ".json": "FORMAT json, ARRAY true",
    ".jsonl": "FORMAT json",
}


def open_files(paths: Sequence[Path]) -> duckdb.DuckDBPyConnection:
    """A connection with a view for every file, named as the file without its ending.

    The first database is opened itself and can be written to; others are attached.

    Raises:
        ValueError: a file is not there, of an unknown kind, not readable, or has another's name.
    """
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{path} given: there is no such file")
        if _ending(path) not in (*_DATABASES, *_READERS):
            raise ValueError(
                f"{path} given, expected a file that ends with one of "
                f"{', '.join((*_DATABASES, *_READERS))}"
            )
    databases = [path for path in paths if _ending(path) in _DATABASES]
    try:
        connection = duckdb.connect(str(databases[0]) if databases else ":memory:")
        for path in databases[1:]:
            connection.execute(
                f"ATTACH {literal(str(path))} AS {quoted(table_name(path))} (READ_ONLY)"
            )
        names: dict[str, Path] = {}
        for path in paths:
            if path in databases:
                continue
            name = table_name(path)
            if name in names:
                raise ValueError(
                    f"{path} and {names[name]} would both be the table {name}: rename one of them"
                )
            names[name] = path
            reader = _READERS[_ending(path)]
            connection.execute(
                f"CREATE TEMP VIEW {quoted(name)} AS SELECT * FROM {reader}({literal(str(path))})"
            )
    except duckdb.Error as error:
        raise ValueError(f"a file cannot be read: {error}") from error
    return connection


def table_name(path: Path) -> str:
    """A name that needs no quotes in SQL."""
    stem = path.name.split(".")[0]
    name = re.sub(r"\W+", "_", stem).strip("_").lower() or "table"
    return f"t_{name}" if name[0].isdigit() else name


def check_output(path: Path) -> None:
    """
    Raises:
        ValueError: the kind of the file is not known.
    """
    if path.suffix.lower() not in _WRITERS:
        raise ValueError(
            f"--output {path} given, expected a file that ends with one of {', '.join(_WRITERS)}"
        )


def write_relation(
    connection: duckdb.DuckDBPyConnection, relation: duckdb.DuckDBPyRelation, path: Path
) -> None:
    """Write all rows, in the format that the file's name says."""
    # DuckDB finds it by the variable's name; a view would be a row of SHOW TABLES, and cannot read
    # what a statement other than SELECT gives
    __llm_output = relation
    connection.execute(
        f"COPY (SELECT * FROM __llm_output) TO {literal(str(path))} "
        f"({_WRITERS[path.suffix.lower()]})"
    )


def _ending(path: Path) -> str:
    plain = path.with_suffix("") if path.suffix.lower() in _COMPRESSED else path
    return plain.suffix.lower()
