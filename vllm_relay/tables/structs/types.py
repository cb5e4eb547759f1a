# SPDX-License-Identifier: Apache-2.0
"""What a column of structs or lists holds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

from vllm_relay.tables.texts import literal, quoted

INTEGER_FORMATS = {
    f"{'u' * (not is_signed)}int{num_bits}": f"{'U' * (not is_signed)}{name}"
    for num_bits, name in ((8, "TINYINT"), (16, "SMALLINT"), (32, "INTEGER"), (64, "BIGINT"))
    for is_signed in (True, False)
}
"""Types of DuckDB by the format of a JSON schema, as OpenAPI's registry of formats names them."""

_INTEGER_RANGES = {
    name: (0, (1 << int(format[4:])) - 1)
    if format.startswith("u")
    else (-(1 << (int(format[3:]) - 1)), (1 << (int(format[3:]) - 1)) - 1)
    for format, name in INTEGER_FORMATS.items()
}
_LARGEST = {"FLOAT": (2 - 2**-23) * 2.0**127, "DOUBLE": math.inf}


class ValueRangeError(ValueError):
    """A value of the right kind that its type cannot hold."""


@dataclass(frozen=True)
class Scalar:
    """
    Attributes:
        sql: DuckDB's name: VARCHAR, BOOLEAN, DATE, FLOAT, DOUBLE, or an integer type.
    """

    sql: str


@dataclass(frozen=True)
class Enum:
    """
    Attributes:
        texts: that are allowed.
    """

    texts: tuple[str, ...]

    @property
    def sql(self) -> str:
        return f"ENUM({', '.join(map(literal, self.texts))})"


@dataclass(frozen=True)
class ListOf:
    """
    Attributes:
        element: its type.
    """

    element: ColumnType

    @property
    def sql(self) -> str:
        return f"{self.element.sql}[]"


@dataclass(frozen=True)
class Property:
    """
    Attributes:
        name: of the property.
        type: of its values.
        is_nullable: whether null is an answer; else null says in a column that there is none.
        default: of an answer without it; None where there is no default.
    """

    name: str
    type: ColumnType
    is_nullable: bool = False
    default: Any = None


@dataclass(frozen=True)
class StructOf:
    """
    Attributes:
        properties: in the order of the fields.
    """

    properties: tuple[Property, ...]

    @property
    def sql(self) -> str:
        fields = (f"{quoted(each.name)} {each.type.sql}" for each in self.properties)
        return f"STRUCT({', '.join(fields)})"


ColumnType: TypeAlias = "Scalar | Enum | ListOf | StructOf"


def stored(type: ColumnType, value: Any, path: str = "$") -> Any:
    """What the column holds of an answer, as JSON has it.

    Args:
        value: that fits the schema.

    Raises:
        ValueRangeError: the type cannot hold it, or it has a property that the type has not.
    """
    if value is None or isinstance(type, Enum):
        return value
    if isinstance(type, ListOf):
        return [stored(type.element, each, f"{path}[{i}]") for i, each in enumerate(value)]
    if isinstance(type, Scalar):
        return _stored_scalar(type.sql, value, path)
    unknown = [name for name in value if name not in {each.name for each in type.properties}]
    if unknown:
        raise ValueRangeError(f"{path} has {unknown}, which the type has not")
    return {
        each.name: stored(each.type, value.get(each.name, each.default), f"{path}.{each.name}")
        for each in type.properties
    }


def answered(type: ColumnType, value: Any) -> Any:
    """A stored value without the properties that the answer may have left out."""
    if value is None or isinstance(type, (Scalar, Enum)):
        return value
    if isinstance(type, ListOf):
        return [answered(type.element, each) for each in value]
    return {
        each.name: answered(each.type, value[each.name])
        for each in type.properties
        if value[each.name] is not None or each.is_nullable
    }


def _stored_scalar(sql: str, value: Any, path: str) -> Any:
    if sql in _INTEGER_RANGES:
        least, most = _INTEGER_RANGES[sql]
        if not least <= value <= most:
            raise ValueRangeError(f"{path} is {value}, which is beyond {sql}")
        return int(value)
    if sql in _LARGEST:
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number) or abs(number) > _LARGEST[sql]:
            raise ValueRangeError(f"{path} is {value}, which is beyond {sql}")
        return number
    return value
