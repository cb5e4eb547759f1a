# SPDX-License-Identifier: Apache-2.0
"""The type of a column, from the JSON schema of its answers (draft 2020-12)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from vllm_relay.tables.structs.types import (
    INTEGER_FORMATS,
    ColumnType,
    Enum,
    ListOf,
    Property,
    Scalar,
    StructOf,
    ValueRangeError,
    stored,
)

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
        """The type of a schema, and whether null is a value.

        Args:
            references: that led here.
        """
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
