# SPDX-License-Identifier: Apache-2.0
"""The file or folder that COPY ... TO writes."""

from __future__ import annotations

import os
import re

import duckdb
from sqlglot import exp

from vllm_relay.tables.sql.expressions import fold
from vllm_relay.tables.sql.texts import text_of

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
