# SPDX-License-Identifier: Apache-2.0
"""Which schemas determine the type of a column, and which."""

from __future__ import annotations

import datetime
import enum
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from vllm_relay.tables.structs.schemas import StructColumn, schema_of_type


class Genre(enum.Enum):
    DRAMA = "drama"
    COMEDY = "comedy"


class Person(BaseModel):
    name: str
    born: datetime.date | None = None


class Film(BaseModel):
    title: str
    stars: Literal[1, 2, 3]
    genre: Genre = Genre.DRAMA
    director: Person | None = None
    cast: list[Person] = Field(default_factory=list)
    ratings: list[float | None]
    is_good: bool


def test_models_determine_a_type() -> None:
    person = 'STRUCT("name" VARCHAR, "born" DATE)'
    assert StructColumn(Film.model_json_schema()).type.sql == (
        f'STRUCT("title" VARCHAR, "stars" BIGINT, "genre" ENUM(\'drama\', \'comedy\'), '
        f'"director" {person}, "cast" {person}[], "ratings" DOUBLE[], "is_good" BOOLEAN)'
    )


def test_an_enumeration_of_texts_with_quotes() -> None:
    schema = {"type": "array", "items": {"enum": ["it's", 'a "b"', None, "it's"]}}
    assert StructColumn(schema).type.sql == "ENUM('it''s', 'a \"b\"')[]"


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


class Tree(BaseModel):
    children: list[Tree]


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (
            _object(a={"type": ["integer", "string"]}),
            r"\$\.a given, a union .* one type beside null",
        ),
        (
            _object(a={"anyOf": [{"type": "integer"}, {"type": "string"}, {"type": "null"}]}),
            "union",
        ),
        (_object(a=_object(b={})), r"\$\.a\.b given, which any value fits"),
        (_object(a=True), r"\$\.a given, which any value fits"),
        (_object(a={"description": "x"}), "without a type"),
        (_object(a={"type": "null"}), "without a type"),
        (_object(), 'properties may have any name.* under "properties"'),
        (_object(a={"type": "object", "additionalProperties": {"type": "string"}}), "any name"),
        (_object(a={"type": "array"}), r'no type in common.* give "items"'),
        (_object(a={"type": "array", "prefixItems": [{"type": "string"}]}), "a tuple as an object"),
        (_object(a={"type": "array", "items": _object(b={})}), r"\$\.a\[\]\.b given"),
        (_object(a={"type": "string"}, A={"type": "string"}), "differ by more than case"),
        (_object(**{"": {"type": "string"}}), "names of a character or more"),
        (_object(**{"a\0b": {"type": "string"}}), "none of them NUL"),
        (_object(a={"enum": [1, "a"]}), r"an enumeration of \[1, 'a'\]"),
        (_object(a={"enum": [None]}), "an enumeration of"),
        (_object(a={"$ref": "https://example.org/schema"}), "outside of the schema"),
        (_object(a={"$ref": "#/$defs/no"}), "outside of the schema"),
        (Tree.model_json_schema(), "refers to itself"),
        (_object(a={"type": "integer", "default": "x"}), "default is 'x', .* default that fits"),
        (_object(a={"type": "integer", "format": "int8", "default": 200}), "default is 200"),
        ({"type": "string"}, r"at \$ given, which is of type VARCHAR"),
        ({"type": "strin"}, r"\$.type: 'strin' is not valid"),
    ],
)
def test_others_are_refused_with_a_way_out(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){message}") as raised:
        StructColumn(schema)
    assert "'json'" in str(raised.value) or "not valid" in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("STRUCT(a DECIMAL(4, 2))", r"with DECIMAL\(4,2\) in it: write DOUBLE"),
        ("STRUCT(a MAP(VARCHAR, INTEGER))", "a list of STRUCT"),
        ("STRUCT(a UNION(n INTEGER, s VARCHAR))", "a field for each member"),
        ("STRUCT(a INTEGER[3])", "a list, as in INTEGER"),
        ("STRUCT(a HUGEINT)", "write BIGINT"),
        ("STRUCT(a TIMESTAMP)", "write one of .*'DATE'"),
        ("STRUCT(a JSON)", "with JSON in it"),
        ("STRUCT(a NOPE)", "DuckDB does not know"),
        ("STRUCT(cast VARCHAR)", "words of SQL in double quotes"),
        ("STRUCT(a", "DuckDB does not know"),
        ("VARCHAR(3)", "one of structs or lists"),
    ],
)
def test_types_that_no_schema_has_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schema_of_type(text)
