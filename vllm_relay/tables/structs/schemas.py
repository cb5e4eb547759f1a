# SPDX-License-Identifier: Apache-2.0
"""The type of a column, from the JSON schema of its answers (draft 2020-12) or as DuckDB writes it;
answers checked against their schema, and their texts as columns."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from jsonschema import FormatChecker, SchemaError, ValidationError
from jsonschema.exceptions import best_match
from jsonschema.validators import Draft202012Validator, validator_for
from referencing import Registry

from vllm_relay.tables.structs.types import (
    INTEGER_FORMATS,
    ColumnType,
    Enum,
    ListOf,
    Property,
    Scalar,
    StructOf,
    ValueRangeError,
    answered,
    stored,
)

if TYPE_CHECKING:
    import pyarrow as pa

Fits: TypeAlias = "Callable[[Mapping[str, Any], Any], bool]"
"""Whether a value fits a part of the schema."""

_SCALARS = {"string": "VARCHAR", "integer": "BIGINT", "number": "DOUBLE", "boolean": "BOOLEAN"}
_FORMATS = {
    ("string", "date"): "DATE",
    ("number", "float"): "FLOAT",
    **{("integer", format): name for format, name in INTEGER_FORMATS.items()},
}
_AS_JSON = (
    "or ask for the type 'json', whose column holds any JSON: return := 'json' in SQL, "
    "output=Output.of('json', schema=...) in Python"
)


class ColumnTypeError(ValueError):
    """A schema that determines no type of a column."""

    def __init__(self, path: str, problem: str, advice: str) -> None:
        super().__init__(
            f"JSON schema at {path} given, {problem}, expected one that determines the type of a "
            f"column: {advice}, {_AS_JSON}"
        )


def column_type(schema: Mapping[str, Any], fits: Fits) -> ColumnType:
    """
    Args:
        schema: of an object with known properties, or of an array.

    Raises:
        ColumnTypeError: it is of something else, leaves the type of a part open, or has a default
            that does not fit.
    """
    found, _ = _Reader(schema, fits).read(schema, "$", ())
    if not isinstance(found, (StructOf, ListOf)):
        raise ColumnTypeError(
            "$",
            f"which is of type {found.sql}",
            "write an object with properties around it",
        )
    return found


class _Reader:
    def __init__(self, root: Mapping[str, Any], fits: Fits) -> None:
        self._root = root
        self._fits = fits

    def read(self, schema: Any, path: str, references: tuple[str, ...]) -> tuple[ColumnType, bool]:
        """The type of a schema, and whether null is a value."""
        if not isinstance(schema, Mapping) or not schema:
            raise ColumnTypeError(path, "which any value fits", 'give it a "type"')
        if "$ref" in schema:
            reference = schema["$ref"]
            if reference in references:
                raise ColumnTypeError(
                    path,
                    f"which refers to itself by {reference!r}",
                    "write out as many levels as there are",
                )
            return self.read(self._referred(reference, path), path, (*references, reference))
        if len(parts := schema.get("allOf", ())) == 1:
            return self.read(parts[0], path, references)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                return self._of_alternatives(schema[keyword], path, references)
        if "enum" in schema or "const" in schema:
            return _of_values(schema.get("enum", [schema.get("const")]), path)
        names = schema.get("type", [])
        names = [names] if isinstance(names, str) else list(names)
        if not names and "properties" in schema:
            names = ["object"]
        is_nullable = "null" in names
        names = [each for each in names if each != "null"]
        if len(names) != 1:
            raise ColumnTypeError(path, *(_UNION if names else ("without a type", 'give "type"')))
        [name] = names
        if name == "object":
            return self._struct(schema, path, references), is_nullable
        if name == "array":
            return self._list(schema, path, references), is_nullable
        if name not in _SCALARS:
            raise ColumnTypeError(path, f"of type {name!r}", f"give one of {sorted(_SCALARS)}")
        return Scalar(_FORMATS.get((name, schema.get("format", "")), _SCALARS[name])), is_nullable

    def _referred(self, reference: Any, path: str) -> Any:
        found: Any = self._root
        try:
            first, *names = str(reference).split("/")
            if first != "#":
                raise KeyError
            for name in names:
                found = found[name.replace("~1", "/").replace("~0", "~")]
        except (KeyError, TypeError):
            raise ColumnTypeError(
                path,
                f"which refers to {reference!r} outside of the schema",
                'put what it refers to under "$defs"',
            ) from None
        return found

    def _of_alternatives(
        self, alternatives: list[Any], path: str, references: tuple[str, ...]
    ) -> tuple[ColumnType, bool]:
        others = [each for each in alternatives if each != {"type": "null"}]
        if len(others) != 1:
            raise ColumnTypeError(path, *_UNION)
        found, is_nullable = self.read(others[0], path, references)
        return found, is_nullable or len(others) < len(alternatives)

    def _struct(
        self, schema: Mapping[str, Any], path: str, references: tuple[str, ...]
    ) -> StructOf:
        properties = schema.get("properties")
        if not properties or schema.get("additionalProperties") or "patternProperties" in schema:
            raise ColumnTypeError(
                path,
                "an object whose properties may have any name",
                'name all of them under "properties"',
            )
        folded = [name.lower() for name in properties]
        wrong = [
            name
            for name in properties
            if not name or "\0" in name or folded.count(name.lower()) > 1
        ]
        if wrong:
            raise ColumnTypeError(
                path,
                f"with properties named {wrong}",
                "give them names of a character or more, none of them NUL, that differ by more "
                "than case",
            )
        found = []
        for name, each in properties.items():
            type, is_nullable = self.read(each, f"{path}.{name}", references)
            default = self._default(each, type, f"{path}.{name}")
            found.append(Property(name, type, is_nullable, default))
        return StructOf(tuple(found))

    def _default(self, schema: Mapping[str, Any], type: ColumnType, path: str) -> Any:
        default = schema.get("default")
        try:
            if default is None or self._fits(schema, default):
                return stored(type, default)
        except ValueRangeError:
            pass
        raise ColumnTypeError(path, f"whose default is {default!r}", "give a default that fits")

    def _list(self, schema: Mapping[str, Any], path: str, references: tuple[str, ...]) -> ListOf:
        if "prefixItems" in schema or "items" not in schema:
            raise ColumnTypeError(
                path,
                "an array whose elements have no type in common",
                'give "items", or write a tuple as an object',
            )
        return ListOf(self.read(schema["items"], f"{path}[]", references)[0])


_UNION = (
    "a union of types",
    "give one type beside null, or an object with a property for each of them that may be null",
)


def _of_values(values: list[Any], path: str) -> tuple[ColumnType, bool]:
    """The type of an enumeration."""
    others = [each for each in values if each is not None]
    is_nullable = len(others) < len(values)
    kinds = {type(each) for each in others}
    if kinds == {str}:
        return Enum(tuple(dict.fromkeys(others))), is_nullable
    if kinds == {bool}:
        return Scalar("BOOLEAN"), is_nullable
    if kinds == {int}:
        return Scalar("BIGINT"), is_nullable
    if kinds and kinds <= {int, float}:
        return Scalar("DOUBLE"), is_nullable
    raise ColumnTypeError(path, f"an enumeration of {values}", "enumerate texts or numbers")


_WRITTEN_SCALARS: dict[str, dict[str, Any]] = {
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
    import duckdb

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
    return _written_schema(type, text)


def _written_schema(type: Any, text: str) -> dict[str, Any]:
    if str(type) in _WRITTEN_SCALARS:
        return _WRITTEN_SCALARS[str(type)]
    if type.id == "list":
        return {"type": "array", "items": _written_schema(type.children[0][1], text)}
    if type.id == "enum":
        return {"type": "string", "enum": list(type.children[0][1])}
    if type.id == "struct":
        properties = {name: _written_schema(each, text) for name, each in type.children}
        return {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }
    instead = _INSTEAD.get(
        type.id, f"one of {sorted(_WRITTEN_SCALARS)}, an ENUM, a STRUCT or a list"
    )
    raise ValueError(f"type {text!r} given with {type} in it: write {instead}")


class StructColumn:
    """A column of structs or lists.

    Attributes:
        type: of its values.

    Raises:
        ValueError: the schema is none, or determines no type.
    """

    def __init__(self, schema: dict[str, Any]) -> None:
        self._schema = schema
        validator = validator_for(schema, default=Draft202012Validator)
        try:
            validator.check_schema(schema)
        except SchemaError as error:
            raise ValueError(f"JSON schema given: {error.json_path}: {error.message}") from None
        # what a schema refers to elsewhere is not fetched
        self._validator = validator(
            schema, registry=Registry(), format_checker=FormatChecker(["date"])
        )
        self.type = column_type(
            schema, lambda part, value: self._validator.evolve(schema=part).is_valid(value)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # validators cannot be sent to other processes
        return StructColumn, (self._schema,)

    def text(self, answer: Any) -> str:
        """The JSON that the column holds of an answer: every property is there, in the order of the
        fields; what the answer leaves out has the schema's default, or is null.

        Raises:
            ValueError: the answer does not fit the schema, or a type cannot hold its part.
        """
        found: ValidationError | None = best_match(self._validator.iter_errors(answer))
        if found is not None:
            raise ValueError(f"{found.json_path}: {found.message}")
        try:
            return json.dumps(stored(self.type, answer), ensure_ascii=False)
        except ValueRangeError as error:
            raise ValueError(str(error)) from None

    def answered(self, text: str) -> Any:
        """The answer that a text of `text` was made from, but for defaults; null where the answer
        left out what may be null."""
        return answered(self.type, json.loads(text))

    @property
    def arrow_type(self) -> pa.DataType:
        """Of what `arrow` gives."""
        import pyarrow

        return self.arrow(pyarrow.chunked_array([], pyarrow.string())).type

    def arrow(self, texts: pa.ChunkedArray) -> pa.ChunkedArray:
        """The column of texts that were made by `text`, or are missing."""
        import duckdb
        import pyarrow

        given = pyarrow.table({"value": texts})
        with duckdb.connect() as connection:
            connection.register("given", given)
            found = connection.sql(f"SELECT value::JSON::{self.type.sql} AS value FROM given")
            return found.to_arrow_table()["value"]
