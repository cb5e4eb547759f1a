# SPDX-License-Identifier: Apache-2.0
"""Values on their way from an answer's JSON to a column and back."""

from __future__ import annotations

import datetime
import json
import math
import struct
from dataclasses import dataclass
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.depth import cases
from tests.tables.recording_engine import RecordingEngine, Row
from vllm_relay.tables import Output, connect, llm_map
from vllm_relay.tables.outputs import AnswerError
from vllm_relay.tables.structs.schemas import StructColumn
from vllm_relay.tables.texts import literal, quoted


@dataclass
class Kind:
    """
    Attributes:
        sql: a type of DuckDB.
        schema: of its values.
        values: of Python, as DuckDB gives them.
    """

    sql: str
    schema: dict[str, Any]
    values: st.SearchStrategy[Any]


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
SINGLE = st.floats(width=32, allow_nan=False, allow_infinity=False)
DOUBLE = st.floats(allow_nan=False, allow_infinity=False)
SCALARS = [
    Kind("VARCHAR", {"type": "string"}, TEXTS),
    Kind("BOOLEAN", {"type": "boolean"}, st.booleans()),
    Kind("DATE", {"type": "string", "format": "date"}, st.dates()),
    Kind("DOUBLE", {"type": "number"}, DOUBLE),
    Kind("FLOAT", {"type": "number", "format": "float"}, SINGLE),
    *(
        Kind(
            f"{'U' * is_unsigned}{name}",
            {"type": "integer", "format": f"{'u' * is_unsigned}int{bits}"},
            st.integers(0, 2**bits - 1)
            if is_unsigned
            else st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1),
        )
        for name, bits in (("TINYINT", 8), ("SMALLINT", 16), ("INTEGER", 32), ("BIGINT", 64))
        for is_unsigned in (True, False)
    ),
]


@st.composite
def enums(draw: st.DrawFn) -> Kind:
    texts = draw(st.lists(TEXTS.filter(bool), min_size=1, max_size=3, unique=True))
    sql = f"ENUM({', '.join(map(literal, texts))})"
    return Kind(sql, {"type": "string", "enum": texts}, st.sampled_from(texts))


@st.composite
def structs(draw: st.DrawFn, parts: st.SearchStrategy[Kind]) -> Kind:
    names = draw(
        st.lists(
            TEXTS.filter(lambda text: text and "\0" not in text),
            min_size=1, max_size=3, unique_by=lambda text: text.lower(),
        )
    )  # fmt: skip
    found = {name: draw(parts) for name in names}
    return Kind(
        f"STRUCT({', '.join(f'{quoted(name)} {each.sql}' for name, each in found.items())})",
        {
            "type": "object",
            "properties": {name: each.schema for name, each in found.items()},
            "required": names,
            "additionalProperties": False,
        },
        st.fixed_dictionaries({name: each.values for name, each in found.items()}),
    )


def list_of(kind: Kind) -> Kind:
    values = st.lists(kind.values, max_size=3)
    return Kind(f"{kind.sql}[]", {"type": "array", "items": kind.schema}, values)


def optional(kind: Kind) -> Kind:
    schema = {"anyOf": [kind.schema, {"type": "null"}]}
    return Kind(kind.sql, schema, st.none() | kind.values)


LEAVES = st.sampled_from(SCALARS) | enums()


def columns(*, with_null: bool) -> st.SearchStrategy[Kind]:
    def around(parts: st.SearchStrategy[Kind]) -> st.SearchStrategy[Kind]:
        if with_null:
            parts = parts | parts.map(optional)
        return structs(parts) | parts.map(list_of)

    return around(st.recursive(LEAVES, around, max_leaves=5))


def written(value: Any) -> str:
    """The JSON of a value, as a model writes it."""
    return json.dumps(value, default=datetime.date.isoformat, ensure_ascii=False)


@settings(max_examples=cases(60))
@given(columns(with_null=True), st.data())
def test_values_come_back_from_columns(kind: Kind, data: st.DataObject) -> None:
    values = data.draw(st.lists(kind.values, min_size=1, max_size=3))
    column = StructColumn(kind.schema)
    texts = [column.text(json.loads(written(value))) for value in values]
    found = column.arrow(pa.chunked_array([[*texts, None]]))
    assert found.to_pylist() == [*values, None]
    assert [column.text(column.answered(text)) for text in texts] == texts


@settings(max_examples=cases(30))
@given(columns(with_null=False))
def test_types_written_out_are_the_columns_of_their_schemas(kind: Kind) -> None:
    output = Output.of(kind.sql)
    assert output == Output.of("struct", schema=json.loads(output.schema_json))
    assert output.struct is not None
    # the schema of BIGINT needs no format
    assert json.loads(output.schema_json.replace(', "format": "int64"', "")) == json.loads(
        json.dumps(kind.schema).replace(', "format": "int64"', "")
    )
    with duckdb.connect() as connection:
        assert str(connection.type(output.struct.type.sql)) == str(connection.type(kind.sql))


@settings(max_examples=cases(15))
@given(columns(with_null=True), st.data())
def test_values_come_back_from_statements_and_data_frames(kind: Kind, data: st.DataObject) -> None:
    values = data.draw(st.lists(kind.values, min_size=1, max_size=3))
    engine = RecordingEngine(lambda row: written(values[row["n"]]))
    table = pa.table({"n": list(range(len(values)))})
    # null, where everything is one, is an answer
    assert llm_map(table, "What?", engine=engine, output=kind.schema).objects == values
    call = (
        f"llm('What is {{n}}?', return := 'struct', schema := {literal(json.dumps(kind.schema))})"
    )
    with connect(engine=engine, tables={"t": table}) as connection:
        result = connection.sql(f"SELECT {call} FROM t ORDER BY n")
        assert result is not None and not result.errors
        assert [value for (value,) in result.fetchall()] == values
        explained = connection.explain(f"SELECT {call} FROM t WHERE {call} IS NOT NULL")
        assert explained.num_rows == 2 * len(values)


def test_fields_of_answers_stand_wherever_expressions_do() -> None:
    def answer(row: Row) -> str:
        return written({"stars": row["n"], "seen": datetime.date(2020, 1, 1 + row["n"])})

    call = "llm('What is {n}?', return := $$STRUCT(stars TINYINT, seen DATE)$$)"
    with connect(engine=RecordingEngine(answer)) as connection:
        connection.sql("CREATE TABLE t AS SELECT range AS n FROM range(6)")
        result = connection.sql(
            f"SELECT {call}.seen, count(*) OVER (ORDER BY {call}.stars DESC) FROM t "
            f"WHERE {call}.stars % 2 = 1 AND {call}.seen > DATE '2020-01-02' ORDER BY 2"
        )
        assert result is not None
        days = [datetime.date(2020, 1, day) for day in (6, 4)]
        assert result.fetchall() == [(days[0], 1), (days[1], 2)]
        connection.sql(f"CREATE TABLE kept AS SELECT {call} AS answer FROM t")
        described = connection.sql("SELECT typeof(answer) FROM kept LIMIT 1")
        assert described is not None
        assert described.fetchall() == [("STRUCT(stars TINYINT, seen DATE)",)]


SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "size": {"type": "integer", "format": "int8"},
        "share": {"type": "number", "format": "float", "maximum": 1e39},
        "day": {"type": "string", "format": "date"},
        "genre": {"enum": ["a", "b"], "default": "b"},
        "words": {"type": "array", "items": {"type": "string", "pattern": "^x"}},
        "part": {"type": "object", "properties": {"n": {"type": ["integer", "null"]}},
                 "required": ["n"]},
    },
    "required": ["id"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ('{"size": 1}', r"\$: 'id' is a required property"),
        ('{"id": null}', r"\$.id: None is not of type 'integer'"),
        ('{"id": "1"}', r"\$.id: '1' is not of type 'integer'"),
        ('{"id": true}', r"\$.id: True is not of type 'integer'"),
        ('{"id": 1.5}', r"\$.id: 1.5 is not of type 'integer'"),
        ('{"id": 9223372036854775808}', r"\$.id is 9223372036854775808, which is beyond BIGINT"),
        ('{"id": 1, "size": 128}', r"\$.size is 128, which is beyond TINYINT"),
        ('{"id": 1, "share": 1e39}', r"\$.share is 1e\+39, which is beyond FLOAT"),
        ('{"id": 1, "share": 1e999}', r"\$.share: inf is greater than"),
        ('{"id": 1, "day": "2023-02-29"}', r"\$.day: '2023-02-29' is not a 'date'"),
        ('{"id": 1, "day": "20230228"}', r"\$.day: '20230228' is not a 'date'"),
        ('{"id": 1, "genre": "c"}', r"\$.genre: 'c' is not one of \['a', 'b'\]"),
        ('{"id": 1, "words": ["x", "y"]}', r"\$.words\[1\]: 'y' does not match '\^x'"),
        ('{"id": 1, "words": ["x", null]}', r"\$.words\[1\]: None is not of type 'string'"),
        ('{"id": 1, "part": {}}', r"\$.part: 'n' is a required property"),
        ('{"id": 1, "part": {"n": 1, "m": 2}}', r"\$.part has \['m'\], which the type has not"),
        ('{"id": 1, "ID": 2}', r"\$ has \['ID'\], which the type has not"),
        ("[]", r"\$: \[\] is not of type 'object'"),
        ("null", r"\$: None is not of type 'object'"),
        ("{", "is not of type struct"),
        ('{"id": NaN}', "is not of type struct"),
        ('{"id": 1, "words": ["\\ud800"]}', "is not of type struct"),
    ],
)
def test_what_does_not_fit_is_an_error(answer: str, message: str) -> None:
    with pytest.raises(AnswerError, match=message):
        Output.of("struct", schema=SCHEMA).parse(answer)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ('```json\n{"id": 1.0, "part": {"n": null}}\n```', {"id": 1, "part": {"n": None}}),
        ('{"id": 1, "id": 2}', {"id": 2}),
        ('{"id": 1, "genre": "a", "share": 2}', {"id": 1, "genre": "a", "share": 2.0}),
    ],
)
def test_what_is_left_out_has_its_default_or_is_null(answer: str, expected: Row) -> None:
    output = Output.of("struct", schema=SCHEMA)
    assert output.struct is not None
    text = str(output.parse(answer))
    left_out: Row = dict.fromkeys(SCHEMA["properties"]) | {"genre": "b"}
    assert json.loads(text) == {**left_out, **expected}
    assert output.struct.answered(text) == {"genre": "b", **expected}
    assert output.struct.arrow(pa.chunked_array([[text]])).to_pylist() == [{**left_out, **expected}]


def test_the_largest_number_of_single_precision_is_one() -> None:
    largest = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]
    output = Output.of("STRUCT(x FLOAT)")
    assert output.struct is not None
    text = output.parse(json.dumps({"x": -largest}))
    assert output.struct.arrow(pa.chunked_array([[text]])).to_pylist() == [{"x": -largest}]
    with pytest.raises(AnswerError, match="beyond FLOAT"):
        output.parse(json.dumps({"x": math.nextafter(largest, math.inf)}))
