# SPDX-License-Identifier: Apache-2.0
"""The JSON schema of a type of DuckDB that is written out."""

from __future__ import annotations

from typing import Any

import duckdb

from vllm_relay.tables.structs.types import INTEGER_FORMATS

_SCALARS: dict[str, dict[str, Any]] = {
    "VARCHAR": {"type": "string"},
    "BOOLEAN": {"type": "boolean"},
    "DATE": {"type": "string", "format": "date"},
    "DOUBLE": {"type": "number"},
    "FLOAT": {"type": "number", "format": "float"},
    **{
        name: {"type": "integer", "format": format}
        for format, name in INTEGER_FORMATS.items()
        if name != "BIGINT"
    },
    "BIGINT": {"type": "integer"},
}
_INSTEAD = {
    "decimal": "DOUBLE, or VARCHAR for all digits",
    "hugeint": "BIGINT, or VARCHAR for all digits",
    "map": "a STRUCT with the keys that there are, or a list of STRUCT(key ..., value ...)",
    "union": "a STRUCT with a field for each member",
    "array": "a list, as in INTEGER[]",
}
_EXAMPLE = "STRUCT(title VARCHAR, score INTEGER)"


def schema_of_type(text: str) -> dict[str, Any]:
    """
    Args:
        text: a type of structs, lists, ENUMs and ordinary columns, as DuckDB reads it. Every field
            is there in every answer, and null nowhere.

    Raises:
        ValueError: it is no such type.
    """
    try:
        with duckdb.connect() as connection:
            type = connection.type(text)
    except duckdb.Error as error:
        first_line = str(error).splitlines()[0]
        raise ValueError(
            f"type {text!r} given, which DuckDB does not know ({first_line}), expected one such as "
            f"{_EXAMPLE}, with names that are words of SQL in double quotes"
        ) from None
    if type.id not in ("struct", "list"):
        raise ValueError(
            f"type {text!r} given, expected one of structs or lists such as {_EXAMPLE}, or one of "
            f"the names 'text', 'int', 'float', 'bool' and 'json'"
        )
    return _schema(type, text)


def _schema(type: Any, text: str) -> dict[str, Any]:
    if str(type) in _SCALARS:
        return _SCALARS[str(type)]
    if type.id == "list":
        return {"type": "array", "items": _schema(type.children[0][1], text)}
    if type.id == "enum":
        return {"type": "string", "enum": list(type.children[0][1])}
    if type.id == "struct":
        properties = {name: _schema(each, text) for name, each in type.children}
        return {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }
    instead = _INSTEAD.get(type.id, f"one of {sorted(_SCALARS)}, an ENUM, a STRUCT or a list")
    raise ValueError(f"type {text!r} given with {type} in it: write {instead}")
